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

    @classmethod
    def of(cls, census: Census, num_parameters: int) -> Plan:
        """The plan that follows from the first census."""
        numbers = range(num_parameters)
        # Without the first rank nothing tells optimizers apart, but then the requests of a step are made at its end,
        # and those of two optimizers do not meet.
        label = f"DistributedOptimizer.{census.number if census.number >= 0 else 'alone'}"
        unknown = {number for number in numbers if number not in census.dense and number not in census.sparse}
        plan = cls(label, [], {}, dict(census.sparse), unknown, unknown & census.unfrozen)
        for members in census.buckets or [list(numbers)]:
            present = [number for number in members if number in census.dense]
            if present:
                plan._append(present)
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
            plan._append(sorted(found & census.dense))
        return plan

    def _append(self, members: Sequence[int]) -> None:
        bucket = Bucket(f"{self.label}.bucket.{len(self.buckets)}", list(members))
        self.buckets.append(bucket)
        self.bucket_of |= dict.fromkeys(members, bucket)
