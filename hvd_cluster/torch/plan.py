"""The plan that all ranks have agreed on.

It says which gradients share a bucket, which are sparse, and which were never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hvd_cluster.torch.gradient_layout import GradientLayout


@dataclass(eq=False)
class GradientBucket:
    """Gradients that travel as one request."""

    name: str
    #: Numbers of the parameters, in the order of the request.
    members: list[int]
    #: The members that took part when the step's first gradient came: those that were not frozen, or all.
    active: list[int] = field(default_factory=list)
    #: How many members that are not frozen are not ready yet.
    num_waiting: int = 0
    is_sent: bool = False
    #: Ranks have frozen different members: all members travel in every step.
    is_whole: bool = False
    #: Some rank may add to it in a later backward pass of this step; which pass is not known yet.
    is_open: bool = False
    #: The last backward pass of a step that reaches a member; 0 if that is not known yet.
    last_pass: int = 0


@dataclass
class Plan:
    """The requests of a step, equal on all ranks and for all steps until it grows."""

    #: The prefix of the names of the optimizer's requests.
    label: str
    buckets: list[GradientBucket]
    bucket_of: dict[int, GradientBucket]
    #: Number of sparse dimensions of the gradients that are gathered.
    sparse: dict[int, int]
    #: Parameters for which no rank has had a gradient.
    unknown: set[int]
    #: Those of ``unknown`` that some rank has not frozen; every step agrees on a layout until there are none.
    awaited: set[int]
    #: For each parameter the last backward pass of a step that reaches it, counted from 1; known after the step that
    #: first sees its gradient. At the end of that pass all ranks send its gradient, or zeros.
    last_passes: dict[int, int] = field(default_factory=dict)
    #: Those of ``sparse`` that some ranks have frozen and others have not.
    frozen_on_some: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, layout: GradientLayout, num_parameters: int) -> Plan:
        """The plan made from the first layout."""
        numbers = range(num_parameters)
        # Without the first rank the names of two optimizers are equal, but then the requests of a step are submitted at
        # its end, so that requests of two optimizers never overlap.
        label = f"DistributedOptimizer.{layout.number if layout.number >= 0 else 'alone'}"
        unknown = {number for number in numbers if number not in layout.dense and number not in layout.sparse}
        plan = cls(label, [], {}, dict(layout.sparse), unknown, unknown & layout.unfrozen)
        plan._add(set(numbers), layout)
        return plan

    def grown(self, layout: GradientLayout) -> Plan:
        """This plan plus the gradients that are new in a later layout."""
        found = self.unknown & (layout.dense | layout.sparse.keys())
        plan = replace(
            self,
            buckets=list(self.buckets),
            bucket_of=dict(self.bucket_of),
            sparse=self.sparse | {number: dim for number, dim in layout.sparse.items() if number in found},
            unknown=self.unknown - found,
            awaited=(self.unknown - found) & layout.unfrozen,
        )
        plan._add(found, layout)
        return plan

    def forget_passes(self) -> None:
        """Forget the last passes: steps will have a different number of backward passes."""
        self.last_passes.clear()
        for bucket in self.buckets:
            bucket.last_pass = 0

    def _add(self, found: set[int], layout: GradientLayout) -> None:
        """Add the dense gradients of ``found`` in the first rank's buckets.

        If that rank is absent, they share one.
        """
        for members in layout.buckets or [sorted(found)]:
            present = [number for number in members if number in found & layout.dense]
            if present:
                self._append(present, layout)
        # Once a step has shown the last passes, what is new comes at the end of the last one.
        if layout.is_last or self.last_passes:
            self.last_passes = layout.last_passes | self.last_passes
            for bucket in self.buckets:
                bucket.is_open = False
                bucket.last_pass = max(self.last_passes.get(number, 0) for number in bucket.members)

    def _append(self, members: Sequence[int], layout: GradientLayout) -> None:
        is_open = not layout.partial.isdisjoint(members)
        bucket = GradientBucket(f"{self.label}.bucket.{len(self.buckets)}", list(members), is_open=is_open)
        self.buckets.append(bucket)
        self.bucket_of |= dict.fromkeys(members, bucket)
