"""What the workers exchange beside gradients, as the optimizer of a fit has it in its attribute ``exchange``."""

from __future__ import annotations

import torch


class Exchange:
    """What the next steps depend on, in addition to the parameters and the optimizer's state."""

    def state(self) -> dict[str, torch.Tensor]:
        """It by name, for a checkpoint; what has the same name on several ranks is equal there."""
        return {}

    def needs(self, name: str) -> bool:
        """Whether this rank loads what a rank has saved by this name."""
        return True

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from :meth:`state`, with the parameters that the model has now."""
