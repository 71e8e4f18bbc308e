"""An optimizer with the methods of a DistributedOptimizer that has nothing to reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvd_cluster.torch.wrapper import Wrapper


class ReadyGradients(Wrapper):
    """The methods of a DistributedOptimizer whose gradients are ready when the backward pass ends."""

    def synchronize(self) -> None:
        """Gradients are ready."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        yield
