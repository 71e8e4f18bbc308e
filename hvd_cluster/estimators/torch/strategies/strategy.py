"""How the workers of a fit hold and update one model: the interfaces.

The model that is whole on every worker is here too.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.spec import TrainSpec
from hvd_cluster.estimators.torch.initial_model import initial_model, share_weights
from hvd_cluster.torch.wrapper import Wrapper

#: The dtypes of ``mixed_precision``.
HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ShardingStrategy(ABC):
    """How the workers of a fit hold and update one model.

    Args:
        spec: of the fit.
    """

    #: Whether each worker holds all parameters.
    holds_all = True
    #: Whether the modules cast to the dtype of ``mixed_precision`` themselves.
    casts = False

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec

    @abstractmethod
    def begin(self, hvd: Collectives, device: torch.device) -> tuple[torch.nn.Module, Any]:
        """What this worker holds of the model, and its optimizer.

        The optimizer has the methods of a ``DistributedOptimizer``. Every rank takes part.
        """

    def equalize(self, optimizer: Any) -> None:  # noqa: B027 - most are equal after each step
        """Make the parameters that several workers hold equal; every rank takes part."""

    def release(self, model: torch.nn.Module) -> None:  # noqa: B027 - most gather nothing
        """Leave only this worker's part of parameters that forward passes have gathered.

        These are forward passes without a backward pass.
        """


class Replicated(ShardingStrategy):
    """The strategy of workers that hold the whole model.

    The mean of the workers' gradients updates it in each step.
    """

    def begin(self, hvd: Collectives, device: torch.device) -> tuple[torch.nn.Module, Any]:
        from hvd_cluster.torch import broadcast_optimizer_state

        model = initial_model(self._spec.model, hvd).to(device)
        base = self._spec.optimizer.build(model)
        share_weights(model, self._spec.model)
        if base.state:  # the given optimizer has made steps; an empty state is equal on all ranks
            broadcast_optimizer_state(base, root_rank=0)
        return model, self._distributed(base, model, hvd)

    def _distributed(self, base: torch.optim.Optimizer, model: torch.nn.Module, hvd: Collectives) -> Any:
        """The optimizer that the workers step together.

        ``base`` has this worker's parameters.
        """
        from hvd_cluster.torch import Compression, DistributedOptimizer

        held = {id(parameter) for group in base.param_groups for parameter in group["params"]}
        return DistributedOptimizer(
            base,
            named_parameters=[(name, one) for name, one in model.named_parameters() if id(one) in held],
            compression=self._spec.gradient_compression or Compression.none,
            backward_passes_per_step=self._spec.backward_passes_per_step,
        )


class ReadyGradients(Wrapper):
    """A DistributedOptimizer's methods, for gradients ready after the backward pass."""

    def synchronize(self) -> None:
        """Gradients are ready."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        yield


class Exchange:
    """The attribute ``exchange`` of optimizers that exchange more than gradients.

    The next steps depend on its state, in addition to the parameters and the optimizer's state.
    """

    def state(self) -> dict[str, torch.Tensor]:
        """The state by name, for a checkpoint.

        What has the same name on several ranks is equal there.
        """
        return {}

    def needs(self, name: str) -> bool:
        """Whether this rank loads what a rank has saved by this name."""
        return True

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from :meth:`state`, with the parameters that the model has now."""
