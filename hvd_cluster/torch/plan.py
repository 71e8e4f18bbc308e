"""What the ranks have agreed on: which gradients travel in which bucket, which are sparse, which were never seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hvd_cluster.torch.census import Census


@dataclass(eq=False)
class Bucket:
    """Gradients that travel as one request."""

    name: str
    #: Numbers of the parameters, in the order of the request.
    members: list[int]
    #: The members that took part when the step's first gradient came: those that were not frozen, or all.
    active: list[int] = field(default_factory=list)
    #: How many of those that are not frozen are not ready yet.
    num_waiting: int = 0
    is_sent: bool = False
    #: Ranks have differed in what is frozen: all members travel at every step.
    is_whole: bool = False
    #: Some rank may add to it in a later backward pass of the present step, and which one is not known yet.
    is_open: bool = False
    #: The backward pass of a step that is the last one to reach a member; 0 if that is not known yet.
    last_pass: int = 0


@dataclass
class Plan:
    """Equal on all ranks, and the same for all steps until it grows."""

    #: Begins the names of the optimizer's requests.
    label: str
    buckets: list[Bucket]
    bucket_of: dict[int, Bucket]
    #: Number of sparse dimensions of the gradients that are gathered.
    sparse: dict[int, int]
    #: Parameters that no rank has had a gradient for.
    unknown: set[int]
    #: Those of them that are not frozen on some rank; a census is taken at every step until there are none.
    awaited: set[int]
    #: The backward pass of a step that is the last one to reach a parameter, counted from 1; once the step in which it
    #: was first seen is over. At the end of that pass all ranks send its gradient, or zeros.
    last_passes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, census: Census, num_parameters: int) -> Plan:
        """The plan that follows from the first census."""
        numbers = range(num_parameters)
        # Without the first rank the names of two optimizers are equal, but then the requests of a step are submitted at
        # its end, so that requests of two optimizers never overlap.
        label = f"DistributedOptimizer.{census.number if census.number >= 0 else 'alone'}"
        unknown = {number for number in numbers if number not in census.dense and number not in census.sparse}
        plan = cls(label, [], {}, dict(census.sparse), unknown, unknown & census.unfrozen)
        for members in census.buckets or [list(numbers)]:
            present = [number for number in members if number in census.dense]
            if present:
                plan._append(present, census)
        plan._settle(census)
        return plan

    def grown(self, census: Census) -> Plan:
        """This plan with the gradients that a later census has seen for the first time."""
        found = self.unknown & (census.dense | census.sparse.keys())
        plan = replace(
            self,
            buckets=list(self.buckets),
            bucket_of=dict(self.bucket_of),
            sparse=self.sparse | {number: dim for number, dim in census.sparse.items() if number in found},
            unknown=self.unknown - found,
            awaited=(self.unknown - found) & census.unfrozen,
        )
        if found & census.dense:
            plan._append(sorted(found & census.dense), census)
        plan._settle(census)
        return plan

    def forget_passes(self) -> None:
        """Steps will have another number of backward passes."""
        self.last_passes.clear()
        for bucket in self.buckets:
            bucket.last_pass = 0

    def _settle(self, census: Census) -> None:
        if census.is_last:
            self.last_passes = census.last_passes | self.last_passes
            for bucket in self.buckets:
                bucket.is_open = False
                bucket.last_pass = max(self.last_passes.get(number, 0) for number in bucket.members)

    def _append(self, members: Sequence[int], census: Census) -> None:
        is_open = not census.partial.isdisjoint(members)
        bucket = Bucket(f"{self.label}.bucket.{len(self.buckets)}", list(members), is_open=is_open)
        self.buckets.append(bucket)
        self.bucket_of |= dict.fromkeys(members, bucket)
