"""Ends a fit on all ranks when its loss or its weights are no longer finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.world import Collectives

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import Inputs

logger = logging.getLogger(__name__)

#: Steps between two checks: a check waits for the device, and does one small allreduce.
_CHECK_EVERY_STEPS = 32
#: Consecutive losses that end a fit with a gradient scaler, which skips single steps.
_NUM_WITH_SCALER = 8


class FiniteCheck:
    """The last steps' losses on their device, checked from time to time.

    All ranks check after the same steps, so that all of them raise the same error. Check before a checkpoint is saved.

    Args:
        enabled: the param ``terminate_on_nan``; if False, all methods do nothing.
        hvd: ``hvd_cluster.torch``.
        run_id: the name of the run.
        has_scaler: a gradient scaler skips steps whose gradients are not finite: single losses do no harm.
        look: reads the batch of an epoch's step again; see :meth:`Readers.not_finite`.
    """

    def __init__(
        self,
        enabled: bool,
        hvd: Collectives,
        run_id: str,
        has_scaler: bool = False,
        look: Callable[[int, int], str | None] | None = None,
    ) -> None:
        self._enabled = enabled
        self._hvd = hvd
        self._run_id = run_id
        self._needed = _NUM_WITH_SCALER if has_scaler else 1
        self._look = look
        #: (steps, loss) since the last check; with a scaler, also earlier ones that were not finite.
        self._kept: list[tuple[range, Any]] = []
        self._last_step = 0

    @staticmethod
    def is_due(done: int) -> bool:
        """Whether to check after ``done`` steps of an epoch.

        The first steps, where most fits diverge, are checked often.
        """
        return done % _CHECK_EVERY_STEPS == 0 or done & (done - 1) == 0

    def add(self, step: int, loss: Any, first: int | None = None) -> None:
        """Keep a step's loss, a tensor of any framework, without waiting for the device.

        Args:
            step: counts from 0 in the epoch.
            first: the loss is that of the steps from this one on.
        """
        if not self._enabled:
            return
        self._last_step = step
        if isinstance(loss, Tensor):  # a copy: with CUDA graphs the next step writes over it
            loss = (loss.detach() if loss.numel() == 1 else loss.detach().float().mean()).reshape(()).clone()
        self._kept.append((range(step if first is None else first, step + 1), loss))

    def check(self, epoch: int, has_finite_weights: Callable[[], bool] | None = None) -> None:
        """Check the weights and the losses since the last check.

        The check is collective: every rank calls it after the same step.

        Args:
            epoch: number of the epoch, for the error.
            has_finite_weights: checks the weights; None skips them.

        Raises:
            DataError: some are not finite on some rank; the text is the same on all ranks.
        """
        if not self._enabled:
            return
        mine = self._problem(epoch, has_finite_weights)
        is_bad = torch.tensor([int(mine is not None)])
        if not self._hvd.allreduce(is_bad, op=self._hvd.Max, name="hvd_cluster.finite_losses").item():
            return
        problems = self._hvd.allgather_object(mine, name="hvd_cluster.finite_losses.found")
        # In one step, a rank whose batch explains the loss comes first.
        found = [(one[0], not one[2], rank, *one[1:]) for rank, one in enumerate(problems) if one is not None]
        step, _, rank, what, columns = min(found, key=lambda one: one[:3])
        raise DataError(
            f"run {self._run_id!r}: {what} on rank {rank} in step {step} of epoch {epoch}, and terminate_on_nan is set "
            f"(True): {_advice(columns)}"
        )

    def _problem(self, epoch: int, has_finite_weights: Callable[[], bool] | None) -> tuple[int, str, str | None] | None:
        """First bad step, its problem, :meth:`Readers.not_finite`'s result; None if fine."""
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
            steps = kept[wrong[0]][0]
            columns = [self._columns(epoch, step) for step in steps]
            explained = next(filter(None, columns), columns[0])
            # Data may spoil the weights in a step whose loss is finite.
            if explained == "" and steps[0] and (before := self._columns(epoch, steps[0] - 1)):
                explained = f"in the step before, {before}"
            return steps[-1], f"the loss is {losses[wrong[0]]}", explained
        if has_finite_weights is not None and not has_finite_weights():
            return self._last_step, "the weights are not finite, though the loss is,", None
        return None

    def _columns(self, epoch: int, step: int) -> str | None:
        if self._look is None:
            return None
        try:
            return self._look(epoch, step)
        except Exception:  # whatever reads or preprocesses: the loss is the error to report
            logger.debug("the batch of step %d cannot be read again", step, exc_info=True)
            return None


def _advice(columns: str | None) -> str:
    if columns:
        return f"{columns}. Fill in or leave out such rows before the fit"
    if columns is None:
        return (
            "lower the learning rate, or look for NaN, infinite or very large numbers in the columns (a date or time "
            "is one large number)"
        )
    return (
        "all numbers of this batch are finite, so lower the learning rate, or scale columns with very large numbers (a "
        "date or time is one large number)"
    )


def not_finite_text(inputs: Inputs, batch: Mapping[str, Tensor]) -> str:
    """The columns of a batch that hold NaN or infinities; empty if none does."""
    return "; ".join(_not_finite_parts(inputs, batch))


def _not_finite_parts(inputs: Inputs, batch: Mapping[str, Tensor]) -> Iterator[str]:
    role = "feature column {!r} holds" if inputs.made is None else "preprocess returned, in {!r},"
    roles = dict.fromkeys(inputs.arguments, role)
    roles |= dict.fromkeys(inputs.label_cols, "label column {!r} holds")
    if inputs.sample_weight_col is not None:
        roles[inputs.sample_weight_col] = "sample_weight_col {!r} holds"
    for name, role in roles.items():
        values = batch.get(name)
        if values is None or not values.is_floating_point() or not len(values):
            continue
        wrong = ~torch.isfinite(values.reshape(len(values), -1)).all(dim=1)
        if wrong.any():
            what = "NaN" if values.isnan().any() else "infinities"
            yield f"{role.format(name)} {what} in {int(wrong.sum())} of {len(values)} rows of this batch"


def _as_floats(losses: list[Any]) -> list[float]:
    """The losses; waits for the device once, if they are tensors."""
    if losses and all(isinstance(loss, Tensor) for loss in losses):
        return torch.stack([loss.to(torch.float64) for loss in losses]).tolist()
    return [float(loss) for loss in losses]


class FiniteWeights:
    """Whether a module's parameters, and saved buffers that are so now, are finite.

    A buffer that is not, such as a mask with infinities, does not count.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        saved = model.state_dict()
        self._buffers = {name for name, one in model.named_buffers() if name in saved and all_finite([one])}

    def __call__(self) -> bool:
        buffers = (one for name, one in self._model.named_buffers() if name in self._buffers)
        return all_finite([*self._model.parameters(), *buffers])


def all_finite(weights: Iterable[Tensor]) -> bool:
    """Whether all numbers of ``weights`` are finite, of a DTensor this rank's.

    It waits for the device once.
    """
    local = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
    found = [torch.isfinite(weight.detach()).all() for weight in local if weight.is_floating_point()]
    return not found or bool(torch.stack([one.to(found[0].device) for one in found]).all())
