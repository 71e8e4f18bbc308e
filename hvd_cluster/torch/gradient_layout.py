"""What the ranks must agree on before they can send gradients in buckets.

Only the first backward pass shows which parameters have a dense gradient, a sparse one, or none, and each rank sees
only its own gradients. One small allreduce combines them and carries the first rank's buckets to the others. It is a
sum and not a broadcast so that it works with ranks that have joined: the sum shows that they are absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from hvd_cluster.engine.membership import member_index, num_members
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import submit

# Columns of the head, and rows of the table below it.
_PRESENT, _FINGERPRINT, _NUMBER, _LAST = range(4)
_HEAD = 4
_DENSE, _SPARSE, _SPARSE_DIMS, _PARTIAL, _REACHED, _LAST_PASS, _SPEC, _UNFROZEN, _BUCKET, _POSITION = range(10)


@dataclass(frozen=True)
class Gradient:
    """What one rank knows about the gradient of one parameter that has one."""

    #: Number of sparse dimensions, or 0 for a dense gradient.
    sparse_dim: int
    #: The last backward pass of this step that reached it, counted from 1; 0 if autograd did not make it.
    last_pass: int = 0
    #: It has had fewer passes than a step takes.
    is_partial: bool = False


@dataclass(frozen=True)
class GradientLayout:
    """What all ranks know together; equal on all of them."""

    #: No rank has joined, so the layout also holds for the next steps.
    is_complete: bool
    #: The first rank's number for this optimizer, unique among the optimizers of its process; -1 if it is absent.
    number: int
    #: Parameters with a dense gradient on some rank.
    dense: frozenset[int]
    #: Parameters whose gradients are sparse wherever they have one: number of sparse dimensions.
    sparse: dict[int, int]
    #: Parameters whose gradient has had fewer passes than a step takes on some rank.
    partial: frozenset[int]
    #: For each parameter that a backward pass of this step has reached: the last such pass, as the mean over ranks.
    last_passes: dict[int, int]
    #: Parameters with a gradient on some rank whose shape or dtype is not the same on all.
    mismatched: frozenset[int]
    #: Parameters that require a gradient on some rank.
    unfrozen: frozenset[int]
    #: The first rank's buckets; empty if it is absent.
    buckets: list[list[int]]
    #: How many ranks will not agree on another layout in this step, and how many take part.
    num_last: int
    num_present: int

    @property
    def is_last(self) -> bool:
        """No rank agrees on another layout in this step."""
        return self.num_last == self.num_present


def fingerprint(texts: Sequence[str]) -> int:
    """A hash of 40 bits: short enough that those of all ranks can be added in int64."""
    digest = hashlib.sha256("\n".join(texts).encode()).digest()
    return int.from_bytes(digest[:5], "big")


def begin_layout(
    gradients: Sequence[Gradient | None],
    unfrozen: Collection[int],
    buckets: Sequence[Sequence[int]],
    *,
    name: str,
    number: int,
    names_fingerprint: int,
    spec_fingerprints: Sequence[int],
    process_set: ProcessSet,
    is_last: bool,
) -> Callable[[], GradientLayout]:
    """Combine what the ranks of ``process_set`` know.

    Args:
        gradients: what this rank has, for each parameter in the common order; None for no gradient.
        unfrozen: the parameters that require a gradient on this rank.
        buckets: this rank's proposal for the buckets; the first rank's is used.
        name: matches the call with those of the other ranks.
        number: this rank's number for the optimizer; the first rank's is used.
        names_fingerprint: :func:`fingerprint` of this rank's names of the parameters.
        spec_fingerprints: the same for each parameter's shape and dtype on this rank.
        process_set: the ranks that take part.
        is_last: this rank has called ``step()`` and finds no further gradients in this step.

    Returns:
        A function that waits until all of them have called this, and gives the layout. After an exception of a signal
        handler it may be called again. It raises ValueError on all ranks if the parameters have different names on
        some, and HorovodInternalError if the ranks have different numbers of parameters, or the world has ended.
    """
    is_first = member_index(process_set) == 0
    table = _table(gradients, unfrozen, buckets if is_first else (), spec_fingerprints)
    message = _encoded(table, number if is_first else -1, names_fingerprint, is_last)
    handle = submit(
        Kind.ALLREDUCE,
        [message],
        process_set=process_set,
        name=name,
        in_place=True,
        op=ReduceOp.SUM,
        finish=lambda results: results[0],
        is_waited_for=True,
    )

    def layout() -> GradientLayout:
        result: list[list[int]] = handle.wait().tolist()
        head, table = result[0], [row[_HEAD:] for row in result[1:]]
        if head[_FINGERPRINT] != head[_PRESENT] * names_fingerprint:
            raise ValueError(
                "the parameters of a DistributedOptimizer have different names on different ranks: make the same "
                "optimizers over the same model on all ranks, and step them in the same order"
            )
        return _decoded(head, table, spec_fingerprints, num_members(process_set))

    return layout


def _table(
    gradients: Sequence[Gradient | None],
    unfrozen: Collection[int],
    buckets: Sequence[Sequence[int]],
    spec_fingerprints: Sequence[int],
) -> list[list[int]]:
    """What one rank knows: a row per constant above, a column per parameter."""
    rows: list[list[int]] = [[0] * len(gradients) for _ in range(_POSITION + 1)]
    rows[_SPEC][:] = spec_fingerprints
    for index in unfrozen:
        rows[_UNFROZEN][index] = 1
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            rows[_SPARSE if gradient.sparse_dim else _DENSE][index] = 1
            rows[_SPARSE_DIMS][index] = gradient.sparse_dim
            rows[_PARTIAL][index] = int(gradient.is_partial)
            rows[_REACHED][index] = int(gradient.last_pass > 0)
            rows[_LAST_PASS][index] = gradient.last_pass
    for index, bucket in enumerate(buckets):
        for position, member in enumerate(bucket):
            rows[_BUCKET][member] = index + 1
            rows[_POSITION][member] = position
    return rows


def _encoded(table: list[list[int]], number: int, names_fingerprint: int, is_last: bool) -> torch.Tensor:
    """One rank's message, int64 of shape (1 + rows, 4 + parameters).

    The messages of all ranks are added.
    """
    message = torch.zeros(1 + len(table), _HEAD + len(table[0]), dtype=torch.int64, device="cpu")
    message[0, :_HEAD] = torch.tensor([1, names_fingerprint, number + 1, int(is_last)], device="cpu")
    message[1:, _HEAD:] = torch.tensor(table, dtype=torch.int64, device="cpu").view(len(table), -1)
    return message


def _decoded(
    head: list[int], table: list[list[int]], spec_fingerprints: Sequence[int], num_ranks: int
) -> GradientLayout:
    dense = frozenset(index for index, count in enumerate(table[_DENSE]) if count)
    buckets: dict[int, list[tuple[int, int]]] = {}
    for index, (bucket, position) in enumerate(zip(table[_BUCKET], table[_POSITION], strict=True)):
        if bucket:
            buckets.setdefault(bucket, []).append((position, index))
    return GradientLayout(
        is_complete=head[_PRESENT] == num_ranks,
        number=head[_NUMBER] - 1,
        dense=dense,
        sparse={
            index: dims // count
            for index, (count, dims) in enumerate(zip(table[_SPARSE], table[_SPARSE_DIMS], strict=True))
            if count and index not in dense
        },
        partial=frozenset(index for index, count in enumerate(table[_PARTIAL]) if count),
        last_passes={
            index: -(-total // count)
            for index, (count, total) in enumerate(zip(table[_REACHED], table[_LAST_PASS], strict=True))
            if count
        },
        mismatched=frozenset(
            index
            for index, own in enumerate(spec_fingerprints)
            if table[_SPEC][index] != head[_PRESENT] * own and (table[_DENSE][index] or table[_SPARSE][index])
        ),
        unfrozen=frozenset(index for index, count in enumerate(table[_UNFROZEN]) if count),
        buckets=[[index for _, index in sorted(buckets[bucket])] for bucket in sorted(buckets)],
        num_last=head[_LAST],
        num_present=head[_PRESENT],
    )
