"""Ends a fit on all ranks when its loss or its weights are no longer finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.world import Collectives

#: Steps from one look at the losses to the next: a look waits for the device, and is one small allreduce.
_LOOK_EVERY_STEPS = 32
#: With a gradient scaler, this many losses in a row: the scaler skips the steps of single ones.
_TOLERATED_WITH_SCALER = 8


class FiniteCheck:
    """Keeps the losses of the last steps on their device, and looks at them now and then.

    All ranks look after the same steps, so that all of them raise the same error. Look before a checkpoint is saved.

    Args:
        enabled: the param ``terminate_on_nan``; if False, nothing is kept and nothing raised.
        hvd: ``hvd_cluster.torch``.
        run_id: the name of the run.
        has_scaler: a gradient scaler skips steps whose gradients are not finite, so that a single loss does no harm.
    """

    def __init__(self, enabled: bool, hvd: Collectives, run_id: str, has_scaler: bool = False) -> None:
        self._enabled = enabled
        self._hvd = hvd
        self._run_id = run_id
        self._needed = _TOLERATED_WITH_SCALER if has_scaler else 1
        #: (step, loss) since the last look; with a scaler, also those before it that were not finite.
        self._kept: list[tuple[int, Any]] = []
        self._last_step = 0

    @staticmethod
    def is_due(done: int) -> bool:
        """Whether to look after ``done`` steps of an epoch: often in its first steps, where most fits diverge."""
        return done % _LOOK_EVERY_STEPS == 0 or done & (done - 1) == 0

    def add(self, step: int, loss: Any) -> None:
        """Keep a step's loss, a tensor of any framework, without waiting for the device; steps count from 0."""
        if not self._enabled:
            return
        self._last_step = step
        if isinstance(loss, Tensor):  # a copy: with CUDA graphs the next step writes over it
            loss = (loss.detach() if loss.numel() == 1 else loss.detach().float().mean()).reshape(()).clone()
        self._kept.append((step, loss))

    def check(self, epoch: int, has_finite_weights: Callable[[], bool] | None = None) -> None:
        """Raise where a loss since the last look, or a weight of the model, is not finite on some rank.

        Every rank takes part, after the same step.

        Args:
            epoch: its number.
            has_finite_weights: looks at the weights; None leaves them out.

        Raises:
            DataError: so it is; the text is the same on all ranks.
        """
        if not self._enabled:
            return
        mine = self._complaint(has_finite_weights)
        is_bad = torch.tensor([int(mine is not None)])
        if not self._hvd.allreduce(is_bad, op=self._hvd.Max, name="hvd_cluster.finite_losses").item():
            return
        told = self._hvd.allgather_object(mine, name="hvd_cluster.finite_losses.found")
        step, rank, what = min((one[0], rank, one[1]) for rank, one in enumerate(told) if one is not None)
        raise DataError(
            f"run {self._run_id!r}: {what} on rank {rank} in step {step} of epoch {epoch}, and terminate_on_nan is set "
            "(True): lower the learning rate, or look for NaN, infinite or very large numbers in the columns (a date "
            "or time is one large number)"
        )

    def _complaint(self, has_finite_weights: Callable[[], bool] | None) -> tuple[int, str] | None:
        """The first step with a loss that is not finite, and what is wrong; None where all is well."""
        kept, self._kept = self._kept, []
        losses = _as_floats([loss for _, loss in kept])
        wrong = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        if self._needed > 1:  # only those at the end, in a row
            finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
            wrong = [index for index in wrong if not finite or index > finite[-1]]
            if 0 < len(wrong) < self._needed:
                self._kept = [kept[index] for index in wrong]  # the next steps decide
                wrong = []
        if wrong:
            return kept[wrong[0]][0], f"the loss is {losses[wrong[0]]}"
        if has_finite_weights is not None and not has_finite_weights():
            return self._last_step, "the weights are not finite, though the loss is,"
        return None


def _as_floats(losses: list[Any]) -> list[float]:
    """Waits for the device once, where the losses are of PyTorch."""
    if losses and all(isinstance(loss, Tensor) for loss in losses):
        return torch.stack([loss.to(torch.float64) for loss in losses]).tolist()
    return [float(loss) for loss in losses]


def all_finite(weights: Iterable[Tensor]) -> bool:
    """Whether all numbers of ``weights`` are finite; waits for the device once."""
    found = [torch.isfinite(weight.detach()).all() for weight in weights if weight.is_floating_point()]
    return not found or bool(torch.stack([one.to(found[0].device) for one in found]).all())
