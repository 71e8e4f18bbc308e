"""The strategy of a module that a factory made: checkpoints hold what the factory does not make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_cluster.estimators.torch import made_state
from hvd_cluster.lightning import HorovodStrategy

_HorovodStrategy: Any = HorovodStrategy


class FactoryModelStrategy(_HorovodStrategy):
    """HorovodStrategy whose checkpoints, those of the user's ModelCheckpoint too, leave out what the factory makes.

    Args:
        made: the :func:`made_state.contents` of the trainer's module, as far as the factory makes it.
        options: those of HorovodStrategy.
    """

    def __init__(self, made: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._trained_part = made_state.TrainedPart(made)

    def _initial_state(self) -> dict[str, Any]:
        equal = made_state.equal_names(self._trained_part.made)
        return {name: value for name, value in super()._initial_state().items() if name not in equal}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The part of the state that is saved."""
        return self._trained_part.of(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load such a part."""
        made_state.load(self.lightning_module, checkpoint["state_dict"])
