"""From gradients that become ready one by one, in every rank's own time, to requests that all ranks make alike.

The first backward pass shows in which order gradients become ready and which of them are sparse; the ranks agree on it
(:mod:`hvd_cluster.torch.census`). From then on each bucket (:mod:`hvd_cluster.torch.buckets`) is one request, made when
its last gradient is ready, while the backward pass goes on. What is not ready when the step comes is sent as zeros.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.submission import running_engine
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.settings import Settings
from hvd_cluster.torch import wire
from hvd_cluster.torch.backward import in_checkpoint
from hvd_cluster.torch.census import fingerprint, take_census
from hvd_cluster.torch.plan import Bucket, Plan
from hvd_cluster.torch.roster import Roster
from hvd_cluster.torch.transfers import Manner, Transfers

_numbers = itertools.count()


class GradientReducer:
    """Reduces the gradients of some parameters over all ranks, in place.

    Args:
        names: a unique name for each parameter, equal on all ranks.
        groups: parameters whose gradients travel together.
        passes_per_step: gradients of so many backward passes are summed before they are reduced.
        manner: how they travel.
        is_sparse_only: the optimizer takes sparse gradients only.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
        passes_per_step: int,
        manner: Manner,
        is_sparse_only: bool = False,
    ) -> None:
        self.manner = manner
        self.roster = Roster(names, groups)
        self._passes_per_step = passes_per_step
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
        #: Parameters that re-entrant checkpoints accumulate several times in one backward pass.
        self._repeated: set[int] = set()
        # A model on several GPUs has a backward thread for each.
        self.lock = threading.RLock()
        # The present step: gradients that are ready, in their order, and what is on its way.
        self._ready: dict[int, torch.Tensor] = {}
        self._active: set[int] = set()
        self._transfers = Transfers(manner)
        self._sent_sparse: set[int] = set()
        self._is_reduced = False
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
        # An optimizer that is gone must not go on sending the gradients of parameters that live on.
        this = weakref.ref(self)
        for number, parameter in enumerate(self.roster.parameters):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # it has no gradient, and cannot have one
            was_frozen = not parameter.requires_grad
            parameter.requires_grad_(True)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, number)))
            parameter.requires_grad_(not was_frozen)

    def add(self, names: dict[torch.Tensor, str]) -> None:
        """Take in more parameters; all ranks do so at the same step."""
        self.roster = Roster(self.roster.named | names, self.roster.groups)
        self._plan = None
        self._repeated.clear()
        self.clear()
        if self._is_attached:
            self.attach()

    def set_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of so many backward passes before they are reduced."""
        self._passes_per_step = passes
        self._passes_left = [passes] * len(self.roster)

    def synchronize(self) -> None:
        """Send what is missing, wait for everything, and leave the reduced gradients in place."""
        try:
            self.finish()
        finally:
            self.clear()

    def finish(self) -> None:
        """Reduce what there is; the step is not over."""
        if not self._is_attached or self._is_reduced:
            return
        if self._ready:
            running_engine().note_span("", "BACKWARD", self._begun_s, self._latest_s)
        try:
            self._send_rest()
        finally:
            self._wait()
        self._is_reduced = bool(self._ready)

    def reset(self) -> None:
        """Forget the gradients that are on their way."""
        self._transfers.give_up()
        try:
            # Where the world has broken, an elastic job goes on with the state that is loaded now.
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
        self._passes_left = [self._passes_per_step] * len(self.roster)
        for bucket in self._plan.buckets if self._plan is not None else ():
            bucket.is_sent = False

    # ---- the backward pass ------------------------------------------------------------------------------------------

    def note(self, number: int, parameter: torch.Tensor) -> None:
        """The backward pass has accumulated the gradient of a parameter; called under the lock.

        Raises:
            AssertionError: the step of an earlier backward pass was forgotten.
        """
        left = self._passes_left[number]
        if left <= 0 or self._is_reduced:
            if not self._begins_anew(number, parameter):
                return
            left = self._passes_per_step
        self._passes_left[number] = left - 1
        gradient = parameter.grad
        if left > 1 or gradient is None:
            return
        if not self._ready:
            self._begin()
        self._ready[number] = gradient
        self._latest_s = time.monotonic()
        plan = self._plan
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

    def _begin(self) -> None:
        """The first gradient of a step is there."""
        self._begun_s = self._latest_s = time.monotonic()
        engine = running_engine()
        if self._engine() is not engine:
            # A plan holds for one world: the new ranks of an elastic job know nothing of it.
            self._engine = weakref.ref(engine)
            self._plan = None
        if self._plan is None:
            return
        active = self._active = set(self.roster.unfrozen(range(len(self.roster))))
        for bucket in self._plan.buckets:
            unfrozen = [number for number in bucket.members if number in active]
            bucket.num_waiting = len(unfrozen)
            bucket.active = list(bucket.members) if bucket.is_whole else unfrozen

    def _begins_anew(self, number: int, parameter: torch.Tensor) -> bool:
        """A gradient comes that nobody waits for: True if it is the first of a new step, False if it counts already."""
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
        if self._ready.get(number) is not parameter.grad:
            # The user has cleared the gradients, not through the optimizer: another model's loss has made them (a GAN).
            self._give_up()
            return True
        raise AssertionError(
            "Gradients were computed more than backward_passes_per_step times before call to step(). "
            f"Increase backward_passes_per_step (now {self._passes_per_step}) to accumulate gradients locally. If this "
            f"was one backward pass, {self.roster.names[number]!r} is used in several re-entrant checkpoints: pass "
            "use_reentrant=False to them."
        )

    def _give_up(self) -> None:
        """Nobody wants the gradients of this step any more, but the other ranks wait for what this one has begun."""
        try:
            if self._plan is not None:
                for bucket in self._plan.buckets:
                    if not bucket.is_sent:
                        self._send_bucket(bucket, bucket.active, is_wanted=False)
                for number in self._plan.sparse:
                    if number not in self._sent_sparse:
                        self._send_sparse(number, self._plan, is_wanted=False)
            self._transfers.give_up()
            self._wait(is_wanted=False)
        finally:
            self.clear()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _agreed(self) -> tuple[Plan, list[int]]:
        """The plan for this step, and the parameters that no rank has a gradient for."""
        plan = self._plan
        if plan is not None and not plan.awaited and not self.roster.unfrozen(plan.unknown):
            return plan, []
        # What a re-entrant checkpoint accumulates repeatedly is known to be whole at the end only.
        ready = sorted(self._ready, key=lambda number: number in self._repeated)
        census = take_census(
            self.roster.gradients(self.manner.keeps_sparse),
            self.roster.unfrozen(range(len(self.roster))),
            self.roster.deal(ready, Settings.from_env().fusion_threshold_bytes) if plan is None else [],
            number=self._number,
            print_of_names=self.roster.fingerprint,
            prints_of_forms=self.roster.prints_of_forms,
            process_set=self.manner.process_set,
        )
        self.roster.require_equal_forms(census.misfits)
        plan = Plan.of(census, len(self.roster)) if plan is None else plan.grown(census)
        if census.is_complete:
            self._plan = plan
        return plan, self.roster.unfrozen(plan.unknown)

    def _send_rest(self) -> None:
        """Send what is not on its way yet; a gradient that this rank did not compute takes part as zeros."""
        if not self._ready:
            self._begin()
        plan, unseen = self._agreed()
        self._plan_of_step = plan
        for bucket in plan.buckets:
            unfrozen = self.roster.unfrozen(bucket.members)
            if not bucket.is_sent:
                here = set(bucket.members if bucket.is_whole else unfrozen)
                present = [number for number in bucket.members if number in here or number in self._ready]
                self._send_bucket(bucket, present)
            elif late := [number for number in unfrozen if number not in bucket.active]:  # unfrozen since it was sent
                self._send(f"{bucket.name}.late", late)
        for number in plan.sparse:
            if number not in self._sent_sparse:
                self._send_sparse(number, plan)
        for number in unseen:
            parameter = self.roster.parameters[number]
            if parameter.grad is None:
                parameter.grad = wire.empty(parameter, 1 if self._is_sparse_only else 0)

    def _wait(self, *, is_wanted: bool = True) -> None:
        """Wait for what is under way; a bucket whose members are frozen on some ranks only is sent again as a whole."""
        try:
            self._transfers.wait()
        except HorovodInternalError:
            mismatched = set(self._transfers.mismatched)
            plan = self._plan_of_step or self._plan
            buckets = [bucket for bucket in plan.buckets if bucket.name in mismatched] if plan is not None else []
            if len(buckets) < len(mismatched) or any(bucket.is_whole for bucket in buckets) or not buckets:
                raise
            for bucket in buckets:
                bucket.is_whole = True
                self._send(f"{bucket.name}.whole", bucket.members, is_wanted=is_wanted)
            self._transfers.wait()

    def _send_bucket(self, bucket: Bucket, present: Sequence[int], *, is_wanted: bool = True) -> None:
        """Send those members of a bucket that take part in this step."""
        bucket.is_sent = True
        self._send(bucket.name, present, is_whole=len(present) == len(bucket.members), is_wanted=is_wanted)

    def _send(self, name: str, numbers: Sequence[int], *, is_whole: bool = True, is_wanted: bool = True) -> None:
        """One request; where ``name`` does not say over which parameters it is, their fingerprint does."""
        parameters = [self.roster.parameters[number] for number in numbers]
        names = [self.roster.names[number] for number in numbers]
        self._transfers.send(
            name,
            parameters,
            [f"allreduce.{parameter_name}" for parameter_name in names],
            members=-1 if is_whole else fingerprint(names),
            is_wanted=is_wanted,
        )

    def _send_sparse(self, number: int, plan: Plan, *, is_wanted: bool = True) -> None:
        self._sent_sparse.add(number)
        name = f"{plan.label}.{self.roster.names[number]}"
        self._transfers.send_sparse(name, self.roster.parameters[number], plan.sparse[number], is_wanted=is_wanted)


def _on_gradient(reducer: Callable[[], GradientReducer | None], number: int, parameter: torch.Tensor) -> None:
    this = reducer()
    if this is not None:
        with this.lock:
            this.note(number, parameter)
