"""The present step of an optimizer: which gradients are ready, and which requests were made of them."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.torch.gradient_layout import fingerprint
from hvd_cluster.torch.parameter_index import ParameterIndex
from hvd_cluster.torch.plan import Bucket, Plan
from hvd_cluster.torch.transfers import Transfers


class Step:
    """Sends the buckets of the plan as their gradients become ready.

    Args:
        index: the optimizer's parameters.
        config: how gradients are reduced.
        is_sparse_only: the optimizer takes sparse gradients only.
        passes_per_step: the number of backward passes whose gradients are summed before they are reduced.
    """

    def __init__(
        self, index: ParameterIndex, config: ReductionConfig, is_sparse_only: bool, passes_per_step: int
    ) -> None:
        self.index = index
        self.passes_per_step = passes_per_step
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
        self._sent_sparse: set[int] = set()
        self.clear()

    @property
    def plan(self) -> Plan | None:
        """The plan that this step follows; None before the ranks have agreed on one."""
        return self._own_plan or self.agreed_plan

    def follow(self, plan: Plan, *, is_agreed: bool) -> None:
        """Follow ``plan`` from here on, in later steps too if all ranks have agreed on it."""
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
        self.num_passes = 0
        self.last_passes.clear()
        self.sent_early.clear()
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
        """All ranks send, at the end of this backward pass, the gradients that ``last_pass`` is the last to reach."""
        return max(last_pass, self.passes_per_step) <= self.num_passes

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

    def not_due(self) -> set[str]:
        """The names of requests that some rank may not make before a later backward pass, or the end of the step."""
        plan = self.plan
        if plan is None:
            return set()
        names = {
            name
            for bucket in plan.buckets
            if bucket.is_open or not self.is_due(bucket.last_pass)
            for name in bucket.names
        }
        sparse = {
            self._name_of_sparse(number, plan)
            for number in plan.sparse
            if not self.is_due(plan.last_passes.get(number, 0))
        }
        return names | sparse

    def is_sent(self, number: int) -> bool:
        """The gradient of a parameter was sent."""
        plan = self.plan
        if plan is None:
            return False
        bucket = plan.bucket_of.get(number)
        return number in self._sent_sparse or (bucket is not None and bucket.is_sent)

    def has_outstanding(self) -> bool:
        """Some gradients of this rank still have to be reduced in this step, or may have to be."""
        plan = self.plan
        if plan is None:
            return True
        is_all_sent = all(bucket.is_sent for bucket in plan.buckets) and len(self._sent_sparse) == len(plan.sparse)
        return not (is_all_sent and plan.unknown.isdisjoint(self.last_passes))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def send_rest(self, plan: Plan) -> None:
        """Send what was not sent yet; a gradient that this rank did not compute takes part as zeros."""
        for bucket in plan.buckets:
            if not bucket.is_sent:
                self._send_bucket(bucket, self._present(bucket))
        for number in plan.sparse:
            if number not in self._sent_sparse:
                self._send_sparse(number, plan)

    def send_late(self, plan: Plan) -> None:
        """Send the gradients of parameters that were unfrozen after their bucket was sent."""
        for bucket in plan.buckets:
            if late := [number for number in self.index.unfrozen(bucket.members) if number not in bucket.active]:
                self._send(f"{bucket.name}.late", late)

    def discard(self) -> None:
        """Send zeros for what other ranks wait for, and ignore the results of all requests."""
        plan = self.plan
        if plan is not None:
            for bucket in plan.buckets:
                if not bucket.is_sent:
                    self._send_bucket(bucket, bucket.active, is_wanted=False)
            for number in plan.sparse:
                if number not in self._sent_sparse:
                    self._send_sparse(number, plan, is_wanted=False)
        self.transfers.discard()

    def wait(self, *, excluding: Container[str] = (), is_wanted: bool = True) -> None:
        """Wait for the requests in flight; a bucket that only some ranks have frozen in part is sent again as a whole.

        Raises:
            HorovodInternalError: the ranks disagree, or the job has ended.
        """
        try:
            self.transfers.wait(excluding)
        except HorovodInternalError:
            mismatched = set(self.transfers.mismatched)
            plan = self.plan
            buckets = [bucket for bucket in plan.buckets if bucket.name in mismatched] if plan is not None else []
            if len(buckets) < len(mismatched) or any(bucket.is_whole for bucket in buckets) or not buckets:
                raise
            for bucket in buckets:
                bucket.is_whole = True
                self._send(bucket.names[1], bucket.members, is_wanted=is_wanted)
            self.transfers.wait(excluding)

    def _present(self, bucket: Bucket) -> list[int]:
        """The members of a bucket that take part in this step if it is sent now."""
        here = set(bucket.members if bucket.is_whole else self.index.unfrozen(bucket.members))
        return [number for number in bucket.members if number in here or number in self.ready]

    def _send_bucket(self, bucket: Bucket, present: Sequence[int], *, is_wanted: bool = True) -> None:
        """Send the members of a bucket that take part in this step."""
        bucket.is_sent = True
        bucket.active = list(present)
        self._send(bucket.name, present, is_whole=len(present) == len(bucket.members), is_wanted=is_wanted)

    def _send(self, name: str, numbers: Sequence[int], *, is_whole: bool = True, is_wanted: bool = True) -> None:
        """Make one request; a fingerprint identifies its parameters if ``name`` does not."""
        parameters = [self.index.parameters[number] for number in numbers]
        names = [self.index.names[number] for number in numbers]
        self.transfers.send(
            name,
            parameters,
            [f"allreduce.{parameter_name}" for parameter_name in names],
            members=-1 if is_whole else fingerprint(names),
            is_wanted=is_wanted,
        )

    def _send_sparse(self, number: int, plan: Plan, *, is_wanted: bool = True) -> None:
        self._sent_sparse.add(number)
        name = self._name_of_sparse(number, plan)
        self.transfers.send_sparse(name, self.index.parameters[number], plan.sparse[number], is_wanted=is_wanted)

    def _name_of_sparse(self, number: int, plan: Plan) -> str:
        return f"{plan.label}.{self.index.names[number]}"
