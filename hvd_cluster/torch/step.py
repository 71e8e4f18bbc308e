"""An optimizer's present step: ready gradients, and the requests made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf

import torch

from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.streams import behind
from hvd_cluster.engine.submission import submit
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.torch.gradient_layout import fingerprint
from hvd_cluster.torch.parameter_index import ParameterIndex
from hvd_cluster.torch.plan import GradientBucket, Plan
from hvd_cluster.torch.transfers import Transfers, takes_part

#: What the ranks must agree on about a request of which they have frozen different parameters: all are sent. Those that
#: have not learned it, because they had joined, send another number. (A fingerprint has 40 bits.)
_WHOLE = 1 << 40


class Step:
    """Sends the buckets of the plan as their gradients become ready.

    Args:
        index: the optimizer's parameters.
        config: how gradients are reduced.
        is_sparse_only: the optimizer takes sparse gradients only.
        passes_per_step: the number of backward passes whose gradients are summed before they are reduced.
        streams: by the number of a parameter, the GPU stream that computes its gradient.
    """

    def __init__(
        self,
        index: ParameterIndex,
        config: ReductionConfig,
        is_sparse_only: bool,
        passes_per_step: int,
        streams: Mapping[int, torch.cuda.Stream],
    ) -> None:
        self.index = index
        self._config = config
        self.passes_per_step = passes_per_step
        self._streams = streams
        self.transfers = Transfers(config, is_sparse_only)
        #: The plan that all ranks have agreed on; None until they have.
        self.agreed_plan: Plan | None = None
        #: The plan of this step, which may be valid only for it: a rank that has joined did not take part.
        self._own_plan: Plan | None = None
        #: Gradients that are ready, in the order in which they became so.
        self.ready: dict[int, torch.Tensor | None] = {}
        #: Parameters that were not frozen when the first gradient was ready.
        self.active: set[int] = set()
        #: Backward passes of this step that are over.
        self.num_passes = 0
        #: By parameter, the latest backward pass of this step that reached it, counted from 1.
        self.last_passes: dict[int, int] = {}
        #: By parameter, how many backward passes it still takes in this step.
        self.passes_left: list[int] = []
        #: Gradients that were sent at the end of a backward pass without all passes of a step.
        self.sent_early: dict[int, torch.Tensor | None] = {}
        #: The ranks have agreed on a layout in this step.
        self.has_agreed = False
        self._sent_sparse: set[int] = set()
        #: Some ranks made a request in a backward pass and others in ``step()``, where the user's code had run before.
        self.is_split = False
        #: By the name of a request: which parameters this rank sent, and whether it did so in ``step()``.
        self._identities: dict[str, tuple[int, bool]] = {}
        #: By the name of a request that will be repeated, what the ranks have sent.
        self._causes: dict[str, Handle] = {}
        self.clear()

    @property
    def plan(self) -> Plan | None:
        """The plan that this step follows; None before the ranks have agreed on one."""
        return self._own_plan or self.agreed_plan

    def follow(self, plan: Plan, *, is_agreed: bool) -> None:
        """Follow ``plan`` from here on, in later steps too if all ranks have agreed."""
        self._own_plan = plan
        if is_agreed:
            self.agreed_plan = plan

    def begin(self) -> None:
        """The first gradient is ready."""
        active = self.active = set(self.index.unfrozen(range(len(self.index))))
        for bucket in self.agreed_plan.buckets if self.agreed_plan is not None else ():
            unfrozen = [number for number in bucket.members if number in active]
            bucket.num_waiting = len(unfrozen)
            bucket.active = list(bucket.members) if bucket.is_whole else unfrozen

    def clear(self) -> None:
        """The step is over."""
        self.ready.clear()
        self.transfers.clear()
        self._sent_sparse.clear()
        self._own_plan = None
        self.has_agreed = False
        self.num_passes = 0
        self.last_passes.clear()
        self.sent_early.clear()
        self.is_split = False
        self._identities.clear()
        self._causes.clear()
        self.passes_left = [self.passes_per_step] * len(self.index)
        for bucket in self.agreed_plan.buckets if self.agreed_plan is not None else ():
            bucket.is_sent = False

    def add_ready(self, number: int, gradient: torch.Tensor, *, is_last: bool) -> None:
        """A gradient is ready: send its bucket if the bucket is complete.

        Args:
            number: of the parameter.
            gradient: as autograd computed it.
            is_last: autograd will not add to it again in this step.
        """
        self.ready[number] = gradient
        plan = self.plan
        if plan is None or not is_last:
            return
        bucket = plan.bucket_of.get(number)
        if bucket is not None:
            if number in self.active:
                bucket.num_waiting -= 1
            elif not bucket.is_sent and number not in bucket.active:  # unfrozen in the middle of the step
                bucket.active.append(number)
            if bucket.num_waiting == 0 and not bucket.is_sent:
                self._send_bucket(bucket, bucket.active)
        elif number in plan.sparse:
            self._send_sparse(number, plan)

    # ---- at the end of a backward pass -------------------------------------------------------------------------------

    def is_due(self, last_pass: int) -> bool:
        """Whether ranks send at this pass's end what ``last_pass`` is the last to reach."""
        return max(last_pass, self.passes_per_step) <= self.num_passes

    def is_layout_due(self) -> bool:
        """At the end of a backward pass: whether the ranks agree on a layout now."""
        plan = self.plan
        if plan is None:
            return bool(self.ready)
        # All ranks agree at the end of the same pass, also those that have nothing new: the user's code that follows
        # must find the same gradients on all of them.
        has_new = not plan.unknown.isdisjoint(self.last_passes)
        is_expected = has_new or (not self.has_agreed and self.awaits_gradients(plan))
        return is_expected and self.is_due(self.last_pass(plan))

    def last_pass(self, plan: Plan) -> int:
        """The pass of a step, counted from 1, at whose end ranks agree on what is new."""
        return max([self.passes_per_step, *plan.last_passes.values()])

    def awaits_gradients(self, plan: Plan) -> bool:
        """Whether some rank may have a gradient in this step that none has had so far."""
        return bool(plan.awaited or self.index.unfrozen(plan.unknown))

    def send_due(self, plan: Plan) -> None:
        """At the end of a backward pass: send what no later pass of this step will reach."""
        for bucket in plan.buckets:
            if bucket.is_sent:
                continue
            present = self._present(bucket)
            if not bucket.is_open and self.is_due(bucket.last_pass):
                self.sent_early.update(dict.fromkeys(number for number in present if number not in self.ready))
                self._send_bucket(bucket, present)
            else:
                bucket.active = present
                bucket.num_waiting = sum(number not in self.ready for number in present)
        for number in plan.sparse:
            if number not in self._sent_sparse and self.is_due(plan.last_passes.get(number, 0)):
                if number not in self.ready:
                    self.sent_early[number] = None
                self._send_sparse(number, plan)

    def not_due(self, num_passes: float | None = None) -> set[str]:
        """Names of requests that some rank may make only in a later pass, or at the end.

        Args:
            num_passes: backward passes that all ranks have done, unless they are in ``step()``; None for this rank's.
        """
        limit = self.num_passes if num_passes is None else num_passes
        return {name for name, due in self._dues().items() if due > limit}

    def _dues(self) -> dict[str, float]:
        """Request -> the pass at whose end all ranks have made it; inf for ``step()``."""
        plan = self.plan
        if plan is None:
            return {}
        passes = self.passes_per_step
        dues = {bucket.name: inf if bucket.is_open else max(bucket.last_pass, passes) for bucket in plan.buckets}
        for number in plan.sparse:
            dues[self._name_of_sparse(number, plan)] = max(plan.last_passes.get(number, 0), passes)
        return dues

    def is_sent(self, number: int) -> bool:
        """The gradient of a parameter was sent."""
        plan = self.plan
        if plan is None:
            return False
        bucket = plan.bucket_of.get(number)
        return number in self._sent_sparse or (bucket is not None and bucket.is_sent)

    def has_outstanding(self) -> bool:
        """Whether gradients of this rank may still have to be reduced in this step."""
        plan = self.plan
        if plan is None:
            return True
        is_all_sent = all(bucket.is_sent for bucket in plan.buckets) and len(self._sent_sparse) == len(plan.sparse)
        return not (is_all_sent and plan.unknown.isdisjoint(self.last_passes))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def send_rest(self, plan: Plan, *, is_over: bool) -> None:
        """Send what was not sent; a gradient not computed here takes part as zeros.

        Args:
            plan: all requests.
            is_over: the step is, so the user's code between ``backward()`` and ``step()`` has run.
        """
        for bucket in plan.buckets:
            if not bucket.is_sent:
                self._send_bucket(bucket, self._present(bucket), is_over=is_over)
        for number in plan.sparse:
            if number not in self._sent_sparse:
                self._send_sparse(number, plan, is_over=is_over)

    def send_late(self, plan: Plan) -> None:
        """Send the gradients of parameters unfrozen after their bucket was sent."""
        for bucket in plan.buckets:
            if late := [number for number in self.index.unfrozen(bucket.members) if number not in bucket.active]:
                self._send(f"{bucket.name}.late", late)
                bucket.active += late

    def discard(self) -> None:
        """Send zeros for what other ranks wait for, and ignore all requests' results."""
        plan = self.plan
        if plan is not None:
            for bucket in plan.buckets:
                if not bucket.is_sent:
                    self._send_bucket(bucket, bucket.active, is_wanted=False)
            for number in plan.sparse:
                if number not in self._sent_sparse:
                    self._send_sparse(number, plan, is_wanted=False)
        self.transfers.discard()

    def wait(self, *, excluding: Set[str] = frozenset(), is_wanted: bool = True) -> None:
        """Wait for the requests in flight; repeat those that ranks sent differently.

        Ranks may have frozen different members of a bucket, and some may be in ``step()`` with fewer backward passes.
        A request may need a repetition while others wait for it at the end of a backward pass, so this rank waits in
        the order of the passes: they make the later requests only after it.

        Raises:
            HorovodInternalError: the ranks disagree, or the job has ended.
        """
        names = [name for name in [*self._causes, *self.transfers.names] if name not in excluding]
        dues = self._dues() if names else {}
        in_flight = [(dues.get(name, inf), name) for name in names]
        try:
            for stage in sorted({due for due, _ in in_flight}):
                self._wait(excluding | {name for due, name in in_flight if due > stage}, is_wanted)
        except HorovodInternalError:
            with suppress(HorovodInternalError):  # none may be in flight any more
                self.transfers.wait(excluding)
            raise

    def _wait(self, excluding: Set[str], is_wanted: bool) -> None:
        try:
            self.transfers.wait(excluding)
        except HorovodInternalError:
            names, plan = list(self.transfers.mismatched), self.plan
            if not names or plan is None or not self._identities.keys() >= set(names):
                raise
            for name in names:
                self._causes[name] = self._ask_why(name)
        if self._causes:
            self._repeat(is_wanted)
            self.transfers.wait(excluding)

    def _repeat(self, is_wanted: bool) -> None:
        """Repeat, with all parameters, the requests that ranks sent differently."""
        plan = self.plan
        assert plan is not None
        buckets = {bucket.name: bucket for bucket in plan.buckets}
        sparse = {self._name_of_sparse(number, plan): number for number in plan.sparse}
        for name, cause in list(self._causes.items()):
            # Ctrl-C, or what a signal handler raises, ends only the wait: the next one continues here.
            num_ranks, num_over, identities = cause.wait().tolist()
            self.is_split |= 0 < num_over < num_ranks
            differ = identities != num_ranks * self._identities[name][0]
            if name in buckets:
                bucket = buckets[name]
                bucket.is_whole |= differ
                self._send(_repeated(name), bucket.members, is_wanted=is_wanted, any_frozen=True)
            else:
                number = sparse[name]
                if differ:
                    plan.frozen_on_some.add(number)
                self.transfers.send_sparse(
                    _repeated(name),
                    self.index.parameters[number],
                    plan.sparse[number],
                    is_wanted=is_wanted,
                    any_frozen=True,
                )
            del self._causes[name]

    def _ask_why(self, name: str) -> Handle:
        """Sum what all ranks know about their requests of one name: (3,), int64."""
        identity, is_over = self._identities[name]
        message = torch.tensor([1, is_over, identity], dtype=torch.int64, device="cpu")
        return submit(
            Kind.ALLREDUCE,
            [message],
            process_set=self._config.process_set,
            name=f"{name}.why",
            op=ReduceOp.SUM,
            finish=lambda results: results[0],
            is_waited_for=True,
        )

    def _present(self, bucket: GradientBucket) -> list[int]:
        """The members of a bucket that take part in this step if it is sent now."""
        here = set(bucket.members if bucket.is_whole else self.index.unfrozen(bucket.members))
        return [number for number in bucket.members if number in here or number in self.ready]

    def _send_bucket(
        self, bucket: GradientBucket, present: Sequence[int], *, is_wanted: bool = True, is_over: bool = False
    ) -> None:
        """Send the members of a bucket that take part in this step."""
        bucket.active = list(bucket.members if bucket.is_whole else present)
        if bucket.is_whole:
            identity = _WHOLE
        else:
            is_all = len(present) == len(bucket.members)
            identity = -1 if is_all else fingerprint([self.index.names[number] for number in present])
        self._identities[bucket.name] = identity, is_over
        self._send(
            bucket.name,
            bucket.active,
            identity=_request_identity(identity, is_over),
            is_wanted=is_wanted,
            any_frozen=bucket.is_whole,
        )
        bucket.is_sent = True  # not before: an exception of a compressor or signal handler may have ended that

    def _send(
        self,
        name: str,
        numbers: Sequence[int],
        *,
        identity: int = -1,
        is_wanted: bool = True,
        any_frozen: bool = False,
    ) -> None:
        """Make one request; ``identity`` must be equal on all ranks."""
        parameters = [self.index.parameters[number] for number in numbers]
        labels = [f"allreduce.{self.index.names[number]}" for number in numbers]
        with self._behind_gradients(numbers):
            self.transfers.send(name, parameters, labels, identity=identity, is_wanted=is_wanted, any_frozen=any_frozen)

    def _send_sparse(self, number: int, plan: Plan, *, is_wanted: bool = True, is_over: bool = False) -> None:
        name, parameter = self._name_of_sparse(number, plan), self.index.parameters[number]
        any_frozen = number in plan.frozen_on_some
        identity = _WHOLE if any_frozen else -1 if takes_part(parameter) else fingerprint([])
        self._identities[name] = identity, is_over
        with self._behind_gradients([number]):
            self.transfers.send_sparse(
                name,
                parameter,
                plan.sparse[number],
                identity=_request_identity(identity, is_over),
                is_wanted=is_wanted,
                any_frozen=any_frozen,
            )
        self._sent_sparse.add(number)

    def _behind_gradients(self, numbers: Sequence[int]) -> AbstractContextManager[None]:
        """A context in which GPUs have computed the gradients, on several streams too."""
        streams = [self._streams[number] for number in numbers if number in self._streams]
        return behind(streams) if streams else nullcontext()

    def _name_of_sparse(self, number: int, plan: Plan) -> str:
        return f"{plan.label}.{self.index.names[number]}"


def _request_identity(identity: int, is_over: bool) -> int:
    """What a request's ranks must agree on: its parameters, and if in ``step()``."""
    return -3 - identity if is_over else identity


def _repeated(name: str) -> str:
    """The name of the request that repeats another with all of its bucket's members."""
    return f"{name}.whole"
