"""Ends a fit on all ranks when its loss or its weights are no longer finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.world import Collectives

#: Steps between two checks: a check waits for the device, and does one small allreduce.
_CHECK_EVERY_STEPS = 32
#: Consecutive losses that end a fit with a gradient scaler, which skips single steps.
_NUM_WITH_SCALER = 8


class FiniteCheck:
    """Keeps the losses of the last steps on their device, and checks them from time to time.

    All ranks check after the same steps, so that all of them raise the same error. Check before a checkpoint is saved.

    Args:
        enabled: the param ``terminate_on_nan``; if False, all methods do nothing.
        hvd: ``hvd_cluster.torch``.
        run_id: the name of the run.
        has_scaler: a gradient scaler skips steps whose gradients are not finite: single losses do no harm.
    """

    def __init__(self, enabled: bool, hvd: Collectives, run_id: str, has_scaler: bool = False) -> None:
        self._enabled = enabled
        self._hvd = hvd
        self._run_id = run_id
        self._needed = _NUM_WITH_SCALER if has_scaler else 1
        #: (step, loss) since the last check; with a scaler, also earlier ones that were not finite.
        self._kept: list[tuple[int, Any]] = []
        self._last_step = 0

    @staticmethod
    def is_due(done: int) -> bool:
        """Whether to check after ``done`` steps of an epoch: often in its first steps, where most fits diverge."""
        return done % _CHECK_EVERY_STEPS == 0 or done & (done - 1) == 0

    def add(self, step: int, loss: Any) -> None:
        """Keep a step's loss, a tensor of any framework, without waiting for the device; steps count from 0."""
        if not self._enabled:
            return
        self._last_step = step
        if isinstance(loss, Tensor):  # a copy: with CUDA graphs the next step writes over it
            loss = (loss.detach() if loss.numel() == 1 else loss.detach().float().mean()).reshape(()).clone()
        self._kept.append((step, loss))

    def check(self, epoch: int, has_finite_weights: Callable[[], bool] | None = None) -> None:
        """Check the losses since the last check, and the weights. Collective, after the same step on every rank.

        Args:
            epoch: number of the epoch, for the error.
            has_finite_weights: checks the weights; None skips them.

        Raises:
            DataError: some are not finite on some rank; the text is the same on all ranks.
        """
        if not self._enabled:
            return
        mine = self._problem(has_finite_weights)
        is_bad = torch.tensor([int(mine is not None)])
        if not self._hvd.allreduce(is_bad, op=self._hvd.Max, name="hvd_cluster.finite_losses").item():
            return
        problems = self._hvd.allgather_object(mine, name="hvd_cluster.finite_losses.found")
        step, rank, what = min((one[0], rank, one[1]) for rank, one in enumerate(problems) if one is not None)
        raise DataError(
            f"run {self._run_id!r}: {what} on rank {rank} in step {step} of epoch {epoch}, and terminate_on_nan is set "
            "(True): lower the learning rate, or look for NaN, infinite or very large numbers in the columns (a date "
            "or time is one large number)"
        )

    def _problem(self, has_finite_weights: Callable[[], bool] | None) -> tuple[int, str] | None:
        """The first step with a problem and its description, or None."""
        kept, self._kept = self._kept, []
        losses = _as_floats([loss for _, loss in kept])
        wrong = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        if self._needed > 1:  # only consecutive ones at the end
            finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
            wrong = [index for index in wrong if not finite or index > finite[-1]]
            if 0 < len(wrong) < self._needed:
                self._kept = [kept[index] for index in wrong]  # decided after the next steps
                wrong = []
        if wrong:
            return kept[wrong[0]][0], f"the loss is {losses[wrong[0]]}"
        if has_finite_weights is not None and not has_finite_weights():
            return self._last_step, "the weights are not finite, though the loss is,"
        return None


def _as_floats(losses: list[Any]) -> list[float]:
    """The losses; waits for the device once, if they are tensors."""
    if losses and all(isinstance(loss, Tensor) for loss in losses):
        return torch.stack([loss.to(torch.float64) for loss in losses]).tolist()
    return [float(loss) for loss in losses]


def all_finite(weights: Iterable[Tensor]) -> bool:
    """Whether all numbers of ``weights`` are finite, of a DTensor this rank's; waits for the device once."""
    local = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
    found = [torch.isfinite(weight.detach()).all() for weight in local if weight.is_floating_point()]
    return not found or bool(torch.stack([one.to(found[0].device) for one in found]).all())
