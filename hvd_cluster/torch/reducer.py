"""Equal requests on all ranks for gradients that become ready at different times.

The first backward pass shows in which order gradients become ready and which of them are sparse. The ranks agree on it
(:mod:`hvd_cluster.torch.gradient_layout`). After that, each bucket (:mod:`hvd_cluster.torch.buckets`) is one request,
submitted when its last gradient is ready, while the backward pass continues.

At the end of each backward pass, before ``backward()`` returns, the reducer waits for what is complete; all optimizers
that the pass has reached send and begin to agree on new gradients before one of them waits. A gradient that the pass
did not reach is sent as zeros there, as DistributedDataParallel does with ``find_unused_parameters`` (arXiv:2006.15704,
section 3.2.3). Where a step has several passes, the ranks agree in the first step which pass is the last one to reach a
parameter. After it every rank has sent the parameter's bucket, so a rank waits only for ranks that have done fewer
passes than itself, and two ranks that reach the same optimizers never wait for each other.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress

import torch

from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.errors import GradientChangedError, HorovodInternalError
from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.torch import error_texts, wire
from hvd_cluster.torch.agreement import LayoutAgreement
from hvd_cluster.torch.backward import GradientHooks, in_checkpoint
from hvd_cluster.torch.parameter_index import ParameterIndex
from hvd_cluster.torch.step import Step
from hvd_cluster.torch.transfers import GradientVersion, is_sum

#: Reductions that change a gradient which is equal on all ranks.
_NOT_TWICE = (ReduceOp.SUM, ReduceOp.PRODUCT)
#: Errors after which nothing of a step is in flight.
_ENDS_STEP = (HorovodInternalError, GradientChangedError, ValueError, AssertionError)


class GradientReducer:
    """Reduces the gradients of some parameters over all ranks, in place.

    Args:
        names: a unique name for each parameter, equal on all ranks.
        groups: parameters whose gradients travel together.
        passes_per_step: the number of backward passes whose gradients are summed before they are reduced.
        config: how they are reduced.
        is_sparse_only: the optimizer takes sparse gradients only.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
        passes_per_step: int,
        config: ReductionConfig,
        is_sparse_only: bool = False,
    ) -> None:
        self.config = config
        self.index = ParameterIndex(names, groups)
        self._is_sparse_only = is_sparse_only
        self._hooks = GradientHooks(self)
        self._step = Step(self.index, config, is_sparse_only, passes_per_step, self._hooks.streams)
        self._agreement = LayoutAgreement(self.index, config, self._hooks.number, self._hooks.maker)
        self._engine: Callable[[], Engine | None] = lambda: None
        self._num_steps = 0  #: so far, for errors
        #: Parameters that re-entrant checkpoints accumulate several times in one backward pass.
        self._repeated: set[int] = set()
        self._is_reduced = False
        #: Gradients that must not be reduced again, when they had been reduced.
        self._reduced: dict[int, GradientVersion] = {}
        #: The gradients at the end of a backward pass that did not complete all of them.
        self._versions: dict[int, GradientVersion] = {}
        self._begun_s = self._latest_s = 0.0  # when the first and the latest gradient were ready, for the timeline

    # ---- for the optimizer -------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Gradients are reduced; False in a world of one, and outside the process set."""
        return self._hooks.is_attached

    @property
    def passes_per_step(self) -> int:
        """The number of backward passes whose gradients are summed before a reduction."""
        return self._step.passes_per_step

    @property
    def has_ready(self) -> bool:
        """Gradients are ready for the step; they may be in flight already."""
        return bool(self._step.ready)

    @property
    def has_gradients(self) -> bool:
        """A backward pass has computed gradients for the step; it may take more of them."""
        return bool(self._step.last_passes)

    @property
    def is_reduced(self) -> bool:
        """Whether this step's gradients were reduced early, for other code to use them."""
        return self._is_reduced

    def attach(self) -> None:
        """Hook into the backward pass, for parameters that are still frozen too."""
        self._hooks.attach(self.index.parameters)

    def follow(self, names: dict[torch.Tensor, str]) -> None:
        """Reduce the gradients of these too; all ranks add them at the same step."""
        # Also those that the optimizer has no longer: apex replaces them by master copies, and copies their gradients.
        step, parameters = self._step, self.index.parameters
        twice = [n for n in step.ready if n not in self._reduced or self._reduced[n].matches(parameters[n])]
        if twice and self.config.op in _NOT_TWICE:  # other gradients are those of a step that GradScaler has skipped
            self._refuse(twice, "had been reduced when parameters were added", "Add them after step().")
        self.index = ParameterIndex(self.index.named | names, self.index.groups)
        self._step = Step(self.index, self.config, self._is_sparse_only, self.passes_per_step, self._hooks.streams)
        self._agreement = LayoutAgreement(self.index, self.config, self._hooks.number, self._hooks.maker)
        self._repeated.clear()
        self.clear()
        if self.is_attached:
            self.attach()

    def set_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of ``passes`` backward passes before they are reduced."""
        self._step.passes_per_step = passes
        self._step.passes_left = [passes] * len(self.index)
        if self._step.agreed_plan is not None:
            self._step.agreed_plan.forget_passes()
            self._agreement.was_last = False

    def synchronize(self) -> None:
        """Send what is missing, wait for all, and leave the reduced gradients in place."""
        try:
            self.finish(is_over=True)
        except _ENDS_STEP:  # and not what a signal handler raises: then the next call waits for the same requests
            self._end_step()
            raise
        self._end_step()

    def _end_step(self) -> None:
        self.clear()
        self._num_steps += 1

    def finish(self, *, is_over: bool = False) -> None:
        """Reduce the gradients so far.

        Args:
            is_over: the step is, so the user's code between ``backward()`` and ``step()`` has run.

        Raises:
            GradientChangedError: a gradient was changed after the backward pass and before it was reduced, possibly
                together with gradients that had been reduced.
            HorovodInternalError: the ranks disagree, or the job has ended.
        """
        if not self.is_attached:
            return
        self._hooks.report_deferred()
        self._require_unchanged()
        if self._is_reduced:
            return
        self._versions.clear()
        try:
            self._send_rest(is_over=is_over)
        except _ENDS_STEP:  # and not other exceptions: ranks may wait for a request that only the next call will make
            self._wait()
            raise
        self._wait()
        self._is_reduced = bool(self._step.ready)
        if self.config.op in _NOT_TWICE:
            self._reduced = {n: GradientVersion.of(self.index.parameters[n]) for n in self._step.ready}
        self._note_versions()

    def reset(self) -> None:
        """Forget the gradients in flight."""
        self._step.transfers.discard()
        try:
            # If the world has ended, an elastic job continues with the state that is loaded now.
            with suppress(HorovodInternalError):
                self._agreement.discard()
                self._step.transfers.wait()
        finally:
            self.clear()

    def clear(self) -> None:
        """The step is over."""
        self._step.clear()
        self._is_reduced = False
        self._reduced.clear()
        self._versions.clear()

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def enter_world(self) -> None:
        """Prepare for a pass's first gradient; the world may be new since the last one."""
        engine = running_engine()
        if self._engine() is not engine:
            # A plan is valid for one world, and so is a step: the new ranks of an elastic job do not know them.
            if self._step.last_passes:
                self.reset()
            self._engine = weakref.ref(engine)
            self._step.agreed_plan = None
            self._agreement.discard()

    def add_gradient(self, number: int, parameter: torch.Tensor) -> None:
        """Take a gradient that the backward pass has accumulated; under the hooks' lock.

        Raises:
            AssertionError: the step of an earlier backward pass was forgotten.
            ValueError: another DistributedOptimizer has the parameter too.
        """
        step, gradient = self._step, parameter.grad
        if gradient is None:  # a hook of the user has taken a step with it, or discarded it
            return
        if self._hooks.is_contested(parameter):
            raise ValueError(error_texts.TWO_OPTIMIZERS.format(name=self.index.names[number]))
        self._hooks.await_end_of_pass()
        left = step.passes_left[number]
        if left <= 0 or self._is_reduced or number in step.sent_early:
            if not self._starts_new_step(number, parameter):
                return
            left = step.passes_per_step
        step.passes_left[number] = left - 1
        self._versions.pop(number, None)
        step.last_passes[number] = step.num_passes + 1
        if left > 1:
            return
        if not step.ready:
            self._begin()
        self._latest_s = time.monotonic()
        step.add_ready(number, gradient, is_last=number not in self._repeated)

    def end_pass(self, *, is_nested: bool) -> Iterator[None]:
        """A backward pass has accumulated its last gradient: reduce what is complete.

        Yields where other optimizers that the pass has reached come first.

        Args:
            is_nested: it was the pass of a re-entrant checkpoint, and its gradients may not be the last ones.

        Raises:
            GradientChangedError: a gradient was changed or replaced while it was being reduced.
            HorovodInternalError: the ranks disagree, or the job has ended.
        """
        step, parameters = self._step, self.index.parameters
        if self._is_reduced or not step.last_passes:  # a hook of the user may have taken the step
            return
        if step.is_split:
            self._require_unchanged()
        if not is_nested:
            step.num_passes += 1
            if step.ready:
                running_engine().note_span("", "BACKWARD", self._begun_s, self._latest_s)
            for send in (self._send_due, self._send_new):
                with step_clock.in_this_thread():  # on GPUs not the one that has called backward() and waits
                    try:
                        send()
                    except _ENDS_STEP:
                        self._wait(excluding=step.not_due())
                        raise
                # Without a common plan there is one name for the requests of all optimizers, so each finishes first.
                if step.agreed_plan is not None:
                    yield
            with step_clock.in_this_thread():
                self._wait(excluding=step.not_due())
            for gradients in (step.ready, step.sent_early):  # a reduction may have replaced a gradient
                for number in gradients:
                    gradients[number] = parameters[number].grad
        self._note_versions()

    def _note_versions(self) -> None:
        """Note gradients that must not change before ``step()``, or weights would differ."""
        step, parameters = self._step, self.index.parameters
        noted: Iterable[int] = step.last_passes if not self._is_reduced and step.has_outstanding() else ()
        if step.is_split:
            noted = range(len(parameters))
        self._versions = {number: GradientVersion.of(parameters[number]) for number in noted}

    def _begin(self) -> None:
        """The first gradient of a step is ready."""
        self._begun_s = self._latest_s = time.monotonic()
        self._step.begin()

    def _starts_new_step(self, number: int, parameter: torch.Tensor) -> bool:
        """Whether an unexpected gradient begins a new step; False if counted already."""
        if self._is_reduced:
            # The step was skipped, as GradScaler does if gradients have overflowed, or continues with the reduced sums.
            if number in self._reduced and self._reduced[number].was_added_to(parameter):
                self._refuse([number], "had been reduced when another backward pass added to it", error_texts.SUM_ONCE)
            self.clear()
            return True
        if in_checkpoint() and (self._step.agreed_plan is None or number in self._repeated):
            self._repeated.add(number)
            return False
        if number in self._step.sent_early:
            earlier = (self._step.ready | self._step.sent_early).items()
            if any(g is not None and self.index.parameters[other].grad is g for other, g in earlier):
                remedy = error_texts.PASS_THEIR_NUMBER.format(passes=self.passes_per_step)
                self._refuse(
                    [number], "had been reduced when another backward pass of the same step added to it", remedy
                )
            self._discard_step()
            return True
        if self._step.ready.get(number) is not parameter.grad and not is_sum(parameter.grad):
            # The user has cleared the gradients without the optimizer: another model's loss has made them (a GAN).
            self._discard_step()
            return True
        raise AssertionError(
            error_texts.TOO_MANY_PASSES.format(passes=self.passes_per_step, name=self.index.names[number])
        )

    def _discard_step(self) -> None:
        """Discard this step's gradients, but complete requests that other ranks wait for."""
        try:
            self._step.discard()
            self._wait(is_wanted=False)
        finally:
            self.clear()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        """At the end of a backward pass: send what no later pass of this step will reach."""
        step = self._step
        if step.plan is not None:
            step.send_due(step.plan)
        if step.is_layout_due():
            self._begin_layout(is_last=False)

    def _send_new(self) -> None:
        """Send the gradients that are new in the layout now being agreed on, if any."""
        if self._agreement.is_pending:
            self._step.send_due(self._agreement.reach(self._step))

    def _begin_layout(self, *, is_last: bool) -> None:
        """Begin a layout, as often as the other ranks: in ``step()`` until all are there."""
        # Other ranks wait for these before they begin: one of them may have to be repeated, by all ranks.
        step = self._step
        if step.has_agreed:
            self._wait(excluding=step.not_due(sys.maxsize))
        elif is_last and step.plan is not None:  # they begin at the end of the last pass
            self._wait(excluding=step.not_due(step.last_pass(step.plan) - 1))
        self._agreement.begin(step, self._repeated, is_last=is_last)

    def _send_rest(self, *, is_over: bool) -> None:
        """Send what was not sent; a gradient not computed here takes part as zeros."""
        step = self._step
        self.enter_world()
        if not step.ready:
            self._begin()
        if (plan := step.plan) is not None:
            # Before any agreement: other ranks may wait for these at the end of their backward pass.
            step.send_rest(plan, is_over=is_over)
        is_settled = plan is not None and self._agreement.is_settled(step, plan)
        while not is_settled:
            self._begin_layout(is_last=True)
            plan = self._agreement.reach(step)
            step.send_rest(plan, is_over=is_over)
            is_settled = self._agreement.was_last
        assert plan is not None
        step.follow(plan, is_agreed=False)
        step.send_late(plan)
        for number in plan.awaited:  # also those that are frozen on this rank only
            parameter = self.index.parameters[number]
            if parameter.grad is None:
                parameter.grad = wire.empty(parameter, 1 if self._is_sparse_only else 0)

    def _wait(self, *, excluding: Set[str] = frozenset(), is_wanted: bool = True) -> None:
        """Wait for the requests in flight, and check that no gradient has changed."""
        self._step.wait(excluding=excluding, is_wanted=is_wanted)
        if changed := self._step.transfers.changed:
            numbers = [self.index.number_of[parameter] for parameter in changed]
            self._refuse(numbers, "was changed or replaced while it was being reduced", error_texts.SYNCHRONIZE_FIRST)

    # ---- errors of the user ------------------------------------------------------------------------------------------

    def _require_unchanged(self) -> None:
        """Check that no gradient of this step has changed since the backward pass's end."""
        changed = [n for n, version in self._versions.items() if not version.matches(self.index.parameters[n])]
        if changed and self._step.is_split:
            what = error_texts.CHANGED_IN_SPLIT_STEP
        elif any(n in self._step.ready or self._step.is_sent(n) for n in changed):
            what = "was changed or replaced before all gradients of the step were reduced"
        else:
            return
        self._refuse(changed, what, error_texts.SYNCHRONIZE_FIRST)

    def _refuse(self, numbers: Sequence[int], what: str, remedy: str) -> None:
        """The ranks would have different weights from here on: fail on all of them.

        Raises:
            GradientChangedError: always.
        """
        step = f"step {self._num_steps} of this optimizer, from 0"
        text = f"The gradient of {self.index.listed(numbers)} {what} ({step}). {remedy}"
        self.clear()
        running_engine().abort(text)
        raise GradientChangedError(text)
