"""Turns gradients, which become ready one by one and on each rank at its own time, into the same requests on all ranks.

The first backward pass shows in which order gradients become ready and which of them are sparse. The ranks agree on it
(:mod:`hvd_cluster.torch.gradient_layout`). After that, each bucket (:mod:`hvd_cluster.torch.buckets`) is one request,
submitted when its last gradient is ready, while the backward pass continues.

At the end of each backward pass, before ``backward()`` returns, the reducer waits for what is complete. A gradient that
the pass did not reach is sent as zeros there, as DistributedDataParallel does with ``find_unused_parameters``
(arXiv:2006.15704, section 3.2.3). Where a step has several passes, the ranks agree in the first step which pass is the
last one to reach a parameter. After it every rank has sent the parameter's bucket, so a rank waits only for ranks that
have done fewer passes than itself, and two ranks never wait for each other.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.submission import running_engine
from hvd_cluster.errors import GradientChangedError, HorovodInternalError
from hvd_cluster.settings import Settings
from hvd_cluster.torch import backward, wire
from hvd_cluster.torch.backward import in_checkpoint
from hvd_cluster.torch.gradient_layout import GradientLayout, agree_on_layout, fingerprint
from hvd_cluster.torch.parameter_index import ParameterIndex
from hvd_cluster.torch.plan import Bucket, Plan
from hvd_cluster.torch.transfers import GradientVersion, Transfers

#: How many parameters an error names.
_MAX_NAMES = 5

_SYNCHRONIZE_FIRST = (
    "Change gradients between backward() and step(). Where a hook does so, or step() follows a backward pass that did "
    "not complete all gradients, call optimizer.synchronize() first, and step() inside `with "
    "optimizer.skip_synchronize():`."
)

_numbers = itertools.count()


class GradientReducer:
    """Reduces the gradients of some parameters over all ranks, in place.

    Args:
        names: a unique name for each parameter, equal on all ranks.
        groups: parameters whose gradients travel together.
        passes_per_step: the number of backward passes whose gradients are summed before they are reduced.
        config: how they travel.
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
        self.passes_per_step = passes_per_step
        self._is_sparse_only = is_sparse_only
        #: Unique among the optimizers of this process.
        self._number = next(_numbers)
        self._hooks: list[Any] = []
        self._is_attached = False
        #: What all ranks have agreed on; None until they all have.
        self._plan: Plan | None = None
        #: What this step goes by, which may hold for this step only: a rank that has joined was not asked.
        self._plan_of_step: Plan | None = None
        self._engine: Callable[[], Engine | None] = lambda: None
        #: Not all ranks were at the end of the step when the latest layout was taken: all take another one there.
        self._needs_layout = False
        #: Steps so far, for errors.
        self._num_steps = 0
        #: Parameters that re-entrant checkpoints accumulate several times in one backward pass.
        self._repeated: set[int] = set()
        # A model on several GPUs has a backward thread for each.
        self.lock = threading.RLock()
        # The present step: gradients that are ready, in their order, and what is on its way.
        self._ready: dict[int, torch.Tensor | None] = {}
        self._active: set[int] = set()
        self._transfers = Transfers(config, is_sparse_only)
        self._sent_sparse: set[int] = set()
        self._is_reduced = False
        #: The backward pass whose end is awaited.
        self._pass_id = -1
        #: Backward passes of this step that are over.
        self._num_passes = 0
        #: By parameter, the latest backward pass of this step that reached it, counted from 1.
        self._last_passes: dict[int, int] = {}
        #: Gradients that were sent at the end of a backward pass without all passes of a step.
        self._sent_early: dict[int, torch.Tensor | None] = {}
        #: What gradients were at the end of a backward pass that left some of them to the step.
        self._versions: dict[int, GradientVersion] = {}
        #: Gradients that hooks of the user's own may still change: see :func:`_on_gradient`.
        self._deferred: list[tuple[int, torch.Tensor]] = []
        # For the timeline: when the first and the latest gradient came.
        self._begun_s = self._latest_s = 0.0
        self.clear()

    # ---- what the optimizer asks for --------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Gradients are reduced; False in a world of one, and outside the process set."""
        return self._is_attached

    @property
    def has_ready(self) -> bool:
        """Gradients wait for the step, and may be on their way."""
        return bool(self._ready)

    @property
    def is_reduced(self) -> bool:
        """They were reduced already, because somebody was about to use them."""
        return self._is_reduced

    def attach(self) -> None:
        """Hook into the backward pass, for frozen parameters too: they may be unfrozen later."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._is_attached = True
        # A deleted optimizer must not keep sending the gradients of parameters that still exist.
        this = weakref.ref(self)
        for number, parameter in enumerate(self.index.parameters):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # it has no gradient, and cannot have one
            was_frozen = not parameter.requires_grad
            parameter.requires_grad_(True)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, number)))
            parameter.requires_grad_(not was_frozen)

    def add(self, names: dict[torch.Tensor, str]) -> None:
        """Take in more parameters; all ranks do so at the same step."""
        self.index = ParameterIndex(self.index.named | names, self.index.groups)
        self._plan = None
        self._repeated.clear()
        self.clear()
        if self._is_attached:
            self.attach()

    def set_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of ``passes`` backward passes before they are reduced."""
        self.passes_per_step = passes
        self._passes_left = [passes] * len(self.index)
        if self._plan is not None:
            self._plan.forget_passes()
            self._needs_layout = True

    def synchronize(self) -> None:
        """Send what is missing, wait for everything, and leave the reduced gradients in place."""
        try:
            self.finish()
        finally:
            self.clear()
            self._num_steps += 1

    def finish(self) -> None:
        """Reduce what there is; the step is not over.

        Raises:
            GradientChangedError: a gradient was changed after the backward pass although it was not reduced yet, or
                gradients that had been reduced were changed together with such.
            HorovodInternalError: the ranks disagree, or the job has ended.
        """
        if not self._is_attached or self._is_reduced:
            return
        self._require_unchanged()
        try:
            self._send_rest()
        finally:
            self._wait()
        self._is_reduced = bool(self._ready)

    def reset(self) -> None:
        """Forget the gradients that are on their way."""
        self._transfers.discard()
        try:
            # If the world has ended, an elastic job continues with the state that is loaded now.
            with suppress(HorovodInternalError):
                self._transfers.wait()
        finally:
            self.clear()

    def clear(self) -> None:
        """The step is over."""
        self._ready.clear()
        self._transfers.clear()
        self._sent_sparse.clear()
        self._is_reduced = False
        self._plan_of_step = None
        self._num_passes = 0
        self._last_passes.clear()
        self._sent_early.clear()
        self._versions.clear()
        self._passes_left = [self.passes_per_step] * len(self.index)
        for bucket in self._plan.buckets if self._plan is not None else ():
            bucket.is_sent = False

    # ---- the backward pass ------------------------------------------------------------------------------------------

    def add_gradient(self, number: int, parameter: torch.Tensor) -> None:
        """The backward pass has accumulated the gradient of a parameter; called under the lock.

        Raises:
            AssertionError: the step of an earlier backward pass was forgotten.
        """
        left = self._passes_left[number]
        if left <= 0 or self._is_reduced or number in self._sent_early:
            if not self._starts_new_step(number, parameter):
                return
            left = self.passes_per_step
        if not self._last_passes:
            self._enter_world()
        self._await_end_of_pass()
        self._passes_left[number] = left - 1
        gradient = parameter.grad
        self._last_passes[number] = self._num_passes + 1
        if left > 1 or gradient is None:
            return
        if not self._ready:
            self._begin()
        self._ready[number] = gradient
        self._latest_s = time.monotonic()
        plan = self._present_plan
        if plan is None or number in self._repeated:
            return
        bucket = plan.bucket_of.get(number)
        if bucket is not None:
            if number in self._active:
                bucket.num_waiting -= 1
            elif not bucket.is_sent and number not in bucket.active:  # unfrozen in the middle of the step
                bucket.active.append(number)
            if bucket.num_waiting == 0 and not bucket.is_sent:
                self._send_bucket(bucket, bucket.active)
        elif number in plan.sparse:
            self._send_sparse(number, plan)

    def defer_gradient(self, number: int, parameter: torch.Tensor) -> None:
        """As :meth:`add_gradient`, but the user's own hooks come first; called under the lock."""
        self._await_end_of_pass()
        self._deferred.append((number, parameter))

    def add_deferred(self) -> None:
        """The user's own hooks have run; called under the lock."""
        if self._deferred:
            hooked, self._deferred = self._deferred, []
            for number, parameter in hooked:
                self.add_gradient(number, parameter)

    def _await_end_of_pass(self) -> None:
        pass_id = backward.current_pass()
        if pass_id != self._pass_id:
            self._pass_id = pass_id
            backward.call_at_end(pass_id, self._number, partial(_at_end_of_pass, weakref.ref(self)))

    def end_pass(self, *, is_nested: bool) -> None:
        """A backward pass has accumulated its last gradient: reduce what is complete.

        Args:
            is_nested: it was the pass of a re-entrant checkpoint, and its gradients may not be the last ones.

        Raises:
            GradientChangedError: a gradient was changed or replaced while it was being reduced.
            HorovodInternalError: the ranks disagree, or the job has ended.
        """
        self._pass_id = -1
        with self.lock:
            self.add_deferred()
        if self._is_reduced:
            return
        if not is_nested:
            self._num_passes += 1
            if self._ready:
                running_engine().note_span("", "BACKWARD", self._begun_s, self._latest_s)
            try:
                self._send_due()
            finally:
                self._wait(but=self._not_due())
            for gradients in (self._ready, self._sent_early):  # a reduction may have put another one in its place
                for number in gradients:
                    gradients[number] = self.index.parameters[number].grad
        marked = self._last_passes if self._has_outstanding() else ()
        self._versions = {number: GradientVersion.of(self.index.parameters[number]) for number in marked}

    @property
    def _present_plan(self) -> Plan | None:
        return self._plan_of_step or self._plan

    def _enter_world(self) -> None:
        engine = running_engine()
        if self._engine() is not engine:
            # A plan holds for one world: the new ranks of an elastic job know nothing of it.
            self._engine = weakref.ref(engine)
            self._plan = None

    def _begin(self) -> None:
        """The first gradient of a step is ready."""
        self._begun_s = self._latest_s = time.monotonic()
        active = self._active = set(self.index.unfrozen(range(len(self.index))))
        for bucket in self._plan.buckets if self._plan is not None else ():
            unfrozen = [number for number in bucket.members if number in active]
            bucket.num_waiting = len(unfrozen)
            bucket.active = list(bucket.members) if bucket.is_whole else unfrozen

    def _starts_new_step(self, number: int, parameter: torch.Tensor) -> bool:
        """An unexpected gradient comes: True if it is the first of a new step, False if it counts already."""
        if self._is_reduced:
            # The step was left out, as GradScaler does where the gradients have overflowed.
            self.clear()
            return True
        if in_checkpoint() and (self._plan is None or number in self._repeated):
            self._repeated.add(number)
            return False
        if self._engine() is not running_engine():
            self.reset()
            return True
        if number in self._sent_early:
            earlier = (self._ready | self._sent_early).items()
            if any(g is not None and self.index.parameters[other].grad is g for other, g in earlier):
                self._refuse(
                    [number],
                    "had been reduced when another backward pass of the same step added to it",
                    "If step() follows several backward passes, pass their number as backward_passes_per_step to "
                    f"DistributedOptimizer (now {self.passes_per_step}), and let the first step have all of them.",
                )
            self._discard_step()
            return True
        if self._ready.get(number) is not parameter.grad:
            # The user has cleared the gradients, not through the optimizer: another model's loss has made them (a GAN).
            self._discard_step()
            return True
        raise AssertionError(
            "Gradients were computed more than backward_passes_per_step times before call to step(). "
            f"Increase backward_passes_per_step (now {self.passes_per_step}) to accumulate gradients locally. If this "
            f"was one backward pass, {self.index.names[number]!r} is used in several re-entrant checkpoints: pass "
            "use_reentrant=False to them."
        )

    def _discard_step(self) -> None:
        """Discard the gradients of this step, but complete the requests that other ranks wait for."""
        plan = self._present_plan
        try:
            if plan is not None:
                for bucket in plan.buckets:
                    if not bucket.is_sent:
                        self._send_bucket(bucket, bucket.active, is_wanted=False)
                for number in plan.sparse:
                    if number not in self._sent_sparse:
                        self._send_sparse(number, plan, is_wanted=False)
            self._transfers.discard()
            self._wait(is_wanted=False)
        finally:
            self.clear()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _agree_on_layout(self, *, is_last: bool) -> GradientLayout:
        """Agree with the other ranks on a plan, or on what this step adds to it.

        Ranks may see new gradients at the ends of different backward passes, and all must take the same number of
        layouts. So whatever happens before, each rank takes further ones in ``step()`` until all are there.
        """
        plan = self._present_plan
        # What a re-entrant checkpoint accumulates repeatedly is known to be whole at the end only.
        ready = sorted(self._ready, key=lambda number: number in self._repeated)
        layout = agree_on_layout(
            self.index.gradients(self.config.keeps_sparse, self._last_passes, self._ready),
            self.index.unfrozen(range(len(self.index))),
            self.index.assign_buckets(ready, Settings.from_env().fusion_threshold_bytes) if plan is None else [],
            number=self._number,
            names_fingerprint=self.index.fingerprint,
            spec_fingerprints=self.index.spec_fingerprints,
            process_set=self.config.process_set,
            is_last=is_last,
        )
        self.index.require_equal_specs(layout.mismatched)
        self._plan_of_step = Plan.of(layout, len(self.index)) if plan is None else plan.grown(layout)
        if layout.is_complete:
            self._plan = self._plan_of_step
        self._needs_layout = not layout.is_last
        return layout

    def _is_due(self, last_pass: int) -> bool:
        """All ranks send at this end of a backward pass what ``last_pass`` is the last one to reach."""
        return max(last_pass, self.passes_per_step) <= self._num_passes

    def _send_due(self) -> None:
        """At the end of a backward pass: send what no later pass of this step will reach."""
        plan = self._present_plan
        if plan is not None:
            self._send_buckets(plan)
        if plan is None:
            is_layout_due = bool(self._ready)
        else:
            has_new = not plan.unknown.isdisjoint(self._ready)
            is_layout_due = has_new and self._is_due(max(plan.last_passes.values(), default=0))
        if is_layout_due:
            self._agree_on_layout(is_last=False)
            plan = self._present_plan
            assert plan is not None
            self._send_buckets(plan)

    def _send_buckets(self, plan: Plan) -> None:
        for bucket in plan.buckets:
            if bucket.is_sent:
                continue
            present = self._present(bucket)
            if not bucket.is_open and self._is_due(bucket.last_pass):
                self._sent_early.update(dict.fromkeys(number for number in present if number not in self._ready))
                self._send_bucket(bucket, present)
            else:
                bucket.active = present
                bucket.num_waiting = sum(number not in self._ready for number in present)
        for number in plan.sparse:
            if number not in self._sent_sparse and self._is_due(plan.last_passes.get(number, 0)):
                if number not in self._ready:
                    self._sent_early[number] = None
                self._send_sparse(number, plan)

    def _not_due(self) -> set[str]:
        """The names of requests that some rank may not make before a later backward pass, or the step."""
        plan = self._present_plan
        if plan is None:
            return set()
        names = {
            name
            for bucket in plan.buckets
            if bucket.is_open or not self._is_due(bucket.last_pass)
            for name in (bucket.name, f"{bucket.name}.whole")
        }
        sparse = {
            self._name_of_sparse(number, plan)
            for number in plan.sparse
            if not self._is_due(plan.last_passes.get(number, 0))
        }
        return names | sparse

    def _present(self, bucket: Bucket) -> list[int]:
        """The members of a bucket that take part in this step, if it is sent now."""
        here = set(bucket.members if bucket.is_whole else self.index.unfrozen(bucket.members))
        return [number for number in bucket.members if number in here or number in self._ready]

    def _send_rest(self) -> None:
        """Send what is not on its way yet; a gradient that this rank did not compute takes part as zeros."""
        if not self._ready:
            self._enter_world()
            self._begin()
        plan = self._present_plan
        if plan is not None:
            # Before any layout: other ranks may wait for these at the end of their backward pass.
            self._send_unsent(plan)
        is_last = plan is not None and not (self._needs_layout or plan.awaited or self.index.unfrozen(plan.unknown))
        while not is_last:
            is_last = self._agree_on_layout(is_last=True).is_last
            plan = self._present_plan
            assert plan is not None
            self._send_unsent(plan)
        assert plan is not None
        self._plan_of_step = plan
        for bucket in plan.buckets:
            unfrozen = self.index.unfrozen(bucket.members)
            if late := [number for number in unfrozen if number not in bucket.active]:  # unfrozen since it was sent
                self._send(f"{bucket.name}.late", late)
        unseen = self.index.unfrozen(plan.unknown)
        for number in unseen:
            parameter = self.index.parameters[number]
            if parameter.grad is None:
                parameter.grad = wire.empty(parameter, 1 if self._is_sparse_only else 0)

    def _send_unsent(self, plan: Plan) -> None:
        for bucket in plan.buckets:
            if not bucket.is_sent:
                self._send_bucket(bucket, self._present(bucket))
        for number in plan.sparse:
            if number not in self._sent_sparse:
                self._send_sparse(number, plan)

    def _wait(self, *, but: Container[str] = (), is_wanted: bool = True) -> None:
        """Wait for what is under way; a bucket whose members are frozen on some ranks only is sent again as a whole."""
        try:
            self._transfers.wait(but)
        except HorovodInternalError:
            mismatched = set(self._transfers.mismatched)
            plan = self._present_plan
            buckets = [bucket for bucket in plan.buckets if bucket.name in mismatched] if plan is not None else []
            if len(buckets) < len(mismatched) or any(bucket.is_whole for bucket in buckets) or not buckets:
                raise
            for bucket in buckets:
                bucket.is_whole = True
                self._send(f"{bucket.name}.whole", bucket.members, is_wanted=is_wanted)
            self._transfers.wait(but)
        if self._transfers.changed:
            number_of = {parameter: number for number, parameter in enumerate(self.index.parameters)}
            self._refuse(
                [number_of[p] for p in self._transfers.changed],
                "was changed or replaced while it was being reduced",
                _SYNCHRONIZE_FIRST,
            )

    # ---- what the user must not do ----------------------------------------------------------------------------------

    def _has_outstanding(self) -> bool:
        """This rank has gradients of this step that still have to be reduced, or may."""
        plan = self._present_plan
        if plan is None:
            return True
        is_all_sent = all(bucket.is_sent for bucket in plan.buckets) and len(self._sent_sparse) == len(plan.sparse)
        return not (is_all_sent and plan.unknown.isdisjoint(self._last_passes))

    def _is_reduced_already(self, number: int, plan: Plan) -> bool:
        bucket = plan.bucket_of.get(number)
        return number in self._sent_sparse or (bucket is not None and bucket.is_sent)

    def _require_unchanged(self) -> None:
        """Check that gradients that still have to be reduced, or such and reduced ones, are what autograd has left."""
        if not self._versions:
            return
        changed = [n for n, version in self._versions.items() if not version.matches(self.index.parameters[n])]
        if not changed:
            return
        plan = self._present_plan
        if any(n in self._ready or (plan is not None and self._is_reduced_already(n, plan)) for n in changed):
            self._refuse(
                changed, "was changed or replaced before all gradients of the step were reduced", _SYNCHRONIZE_FIRST
            )

    def _refuse(self, numbers: Sequence[int], what: str, remedy: str) -> None:
        """The ranks would have different weights from here on: fail on all of them.

        Raises:
            GradientChangedError: always.
        """
        names = ", ".join(repr(self.index.names[number]) for number in numbers[:_MAX_NAMES])
        more = f" and of {len(numbers) - _MAX_NAMES} more parameters" if len(numbers) > _MAX_NAMES else ""
        text = f"The gradient of {names}{more} {what} (step {self._num_steps} of this optimizer, from 0). {remedy}"
        self.clear()
        running_engine().abort(text)
        raise GradientChangedError(text)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _send_bucket(self, bucket: Bucket, present: Sequence[int], *, is_wanted: bool = True) -> None:
        """Send those members of a bucket that take part in this step."""
        bucket.is_sent = True
        bucket.active = list(present)
        self._send(bucket.name, present, is_whole=len(present) == len(bucket.members), is_wanted=is_wanted)

    def _send(self, name: str, numbers: Sequence[int], *, is_whole: bool = True, is_wanted: bool = True) -> None:
        """One request; where ``name`` does not say over which parameters it is, their fingerprint does."""
        parameters = [self.index.parameters[number] for number in numbers]
        names = [self.index.names[number] for number in numbers]
        self._transfers.send(
            name,
            parameters,
            [f"allreduce.{parameter_name}" for parameter_name in names],
            members=-1 if is_whole else fingerprint(names),
            is_wanted=is_wanted,
        )

    def _name_of_sparse(self, number: int, plan: Plan) -> str:
        return f"{plan.label}.{self.index.names[number]}"

    def _send_sparse(self, number: int, plan: Plan, *, is_wanted: bool = True) -> None:
        self._sent_sparse.add(number)
        name = self._name_of_sparse(number, plan)
        self._transfers.send_sparse(name, self.index.parameters[number], plan.sparse[number], is_wanted=is_wanted)


def _on_gradient(reducer: Callable[[], GradientReducer | None], number: int, parameter: torch.Tensor) -> None:
    """The hook of a parameter.

    What the user's own hooks make of the gradient is what is reduced, also of those that were registered later and run
    after this one: then the gradient is noted when the next one comes.
    """
    this = reducer()
    if this is None:
        return
    hooks = parameter._post_accumulate_grad_hooks
    is_last = getattr(next(reversed(hooks.values())), "func", None) is _on_gradient
    with this.lock:
        this.add_deferred()
        if is_last:
            this.add_gradient(number, parameter)
        else:
            this.defer_gradient(number, parameter)


def _at_end_of_pass(reducer: Callable[[], GradientReducer | None], is_nested: bool) -> None:
    this = reducer()
    if this is not None:
        this.end_pass(is_nested=is_nested)
