"""``communication=PowerSGD(...)``: gradients of low rank, by ``powerSGD_hook``.

The hook is torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.strategies.communication import PowerSGD
from hvd_cluster.estimators.torch.strategies.strategy import Exchange, Replicated
from hvd_cluster.torch.wrapper import Wrapper, wrap


class LowRank(Replicated):
    """As :class:`Replicated`, with approximations of the gradients."""

    def _distributed(self, base: torch.optim.Optimizer, model: torch.nn.Module, hvd: Collectives) -> Any:
        parameters = [one for group in base.param_groups for one in group["params"]]
        optimizer = wrap(base, ReducesBeforeSteps)
        optimizer.exchange = LowRankGradients(self._spec.communication, parameters, hvd.rank())
        return optimizer


class LowRankGradients(Exchange):
    """Replaces the gradients of this rank by their approximate mean over all ranks.

    Args:
        config: of the approximation.
        parameters: in the same order on all ranks. Those that require a gradient take part; a fit may freeze and
            unfreeze them.
        rank: this one.
    """

    def __init__(self, config: PowerSGD, parameters: Sequence[Any], rank: int) -> None:
        self._parameters = list(parameters)
        #: Which of them are in the buckets.
        self._trained: list[bool] = []
        self._buckets: list[_Bucket] = []
        self._own_error = f"error-{rank}"
        self._hook = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.rank,
            start_powerSGD_iter=config.start_step,
            min_compression_rate=config.min_compression_rate,
        )
        self._tensors = {
            self._own_error: self._hook.error_dict,
            "p": self._hook.p_memory_dict,
            "q": self._hook.q_memory_dict,
        }

    def reduce(self) -> None:
        """Every rank takes part."""
        self._fit_buckets()
        for bucket in self._buckets:
            bucket.fill()
            powerSGD_hook(self._hook, bucket).wait()
            bucket.return_means()

    def _fit_buckets(self) -> None:
        """Put parameters that train now into new buckets; earlier errors no longer fit."""
        trained = [one.requires_grad for one in self._parameters]
        if trained == self._trained:
            return
        self._trained = trained
        by_kind: dict[tuple[torch.dtype, torch.device], list[Any]] = {}
        for parameter in self._parameters:
            if parameter.requires_grad:
                by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._buckets = [_Bucket(index, each, len(by_kind)) for index, each in enumerate(by_kind.values())]
        for own in self._tensors.values():
            own.clear()

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"{kind}.{index}": one for kind, own in self._tensors.items() for index, one in own.items()}
        return {**found, "step": torch.tensor(self._hook.iter), "trained": torch.tensor(self._trained)}

    def needs(self, name: str) -> bool:
        return not name.startswith("error-") or name.startswith(f"{self._own_error}.")

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self._fit_buckets()
        fits = "trained" in state and state["trained"].tolist() == self._trained
        for name, tensor in state.items():
            kind, _, index = name.partition(".")
            if kind == "step":
                self._hook.iter = int(tensor)
            elif fits and kind != "trained":
                self._tensors[kind][int(index)] = tensor.to(self._buckets[int(index)].buffer().device)


class _Bucket:
    """Gradients of one dtype, with the methods of ``GradBucket`` that the hook calls."""

    def __init__(self, index: int, parameters: Sequence[Any], count: int) -> None:
        self._index, self._count = index, count
        self._parameters = parameters
        self._buffer: torch.Tensor = parameters[0].new_empty(sum(one.numel() for one in parameters))
        parts = self._buffer.split([one.numel() for one in parameters])
        self._parts = [part.view(one.shape) for part, one in zip(parts, parameters, strict=True)]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._index == self._count - 1

    def buffer(self) -> torch.Tensor:
        return _real(self._buffer).view(-1)

    def gradients(self) -> list[torch.Tensor]:
        return [_real(part) for part in self._parts]

    def fill(self) -> None:
        """Copy the gradients here; zeros for parameters without one.

        Raises:
            ValueError: a gradient is sparse.
        """
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.is_sparse:
                raise ValueError("communication=PowerSGD(...) does not work with sparse gradients: use sparse=False")
            else:
                part.copy_(parameter.grad)

    def return_means(self) -> None:
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                parameter.grad.copy_(part)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor`` for the hook: real numbers in at least one dimension."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts if parts.dim() else parts.view(1)


class ReducesBeforeSteps(Wrapper):
    """Methods of a DistributedOptimizer that reduces gradients when its step begins."""

    exchange: LowRankGradients
    _is_synchronized = False

    def synchronize(self) -> None:
        """Replace the gradients by their means; every rank takes part."""
        self.exchange.reduce()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._is_synchronized = True
        try:
            yield
        finally:
            self._is_synchronized = False

    def step(self, closure: Any = None) -> Any:
        if not self._is_synchronized:
            self.synchronize()
        return super().step(closure)
