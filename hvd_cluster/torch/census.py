"""What the ranks have to agree on before gradients can travel in buckets.

Which parameter has a dense gradient, which a sparse one, and which none anywhere, is seen in the first backward pass
only, and each rank sees its own part. One small allreduce brings it together, and carries the first rank's buckets to
the others. It is a sum and no broadcast, so it goes well with ranks that have joined: they are then known to be absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.engine.submission import member_index, num_members
from hvd_cluster.torch.submission import submit, synchronize

# Columns of the head, and rows of the table below it.
_PRESENT, _FINGERPRINT, _NUMBER, _LAST = range(4)
_HEAD = 4
_DENSE, _SPARSE, _SPARSE_DIMS, _PARTIAL, _REACHED, _LAST_PASS, _FORM, _UNFROZEN, _BUCKET, _PLACE = range(10)


@dataclass(frozen=True)
class Gradient:
    """What one rank knows about the gradient of one parameter that has one."""

    #: Number of sparse dimensions, or 0 for a dense gradient.
    sparse_dim: int
    #: The backward pass of this step that reached it last, counted from 1; 0 where autograd did not make it.
    last_pass: int = 0
    #: It has had fewer passes than a step takes.
    is_partial: bool = False


@dataclass(frozen=True)
class Census:
    """What all ranks together know; equal on all of them."""

    #: No rank has joined: what is agreed on holds for the steps to come.
    is_complete: bool
    #: The first rank's number for this optimizer, unique among the optimizers of its process; -1 when it is absent.
    number: int
    #: Parameters with a dense gradient on some rank.
    dense: frozenset[int]
    #: Parameters whose gradients are sparse wherever they have one: number of sparse dimensions.
    sparse: dict[int, int]
    #: Parameters whose gradient has had fewer passes than a step takes on some rank.
    partial: frozenset[int]
    #: Parameters that a backward pass of this step has reached: which pass was the last one, the mean over ranks.
    last_passes: dict[int, int]
    #: Parameters with a gradient on some rank whose shape or dtype is not the same on all.
    misfits: frozenset[int]
    #: Parameters that require a gradient on some rank.
    unfrozen: frozenset[int]
    #: The first rank's buckets; empty when it is absent.
    buckets: list[list[int]]
    #: How many ranks take their last census of the step, and how many take part at all.
    num_last: int
    num_present: int

    @property
    def is_last(self) -> bool:
        """No rank takes another census in this step."""
        return self.num_last == self.num_present


def fingerprint(texts: Sequence[str]) -> int:
    """A number of 40 bits, so that those of all ranks can be added, that differs where the texts do."""
    digest = hashlib.sha256("\n".join(texts).encode()).digest()
    return int.from_bytes(digest[:5], "big")


def take_census(
    gradients: Sequence[Gradient | None],
    unfrozen: Collection[int],
    buckets: Sequence[Sequence[int]],
    *,
    number: int,
    print_of_names: int,
    prints_of_forms: Sequence[int],
    process_set: ProcessSet,
    is_last: bool,
) -> Census:
    """Ask all ranks of ``process_set``; blocks until all have asked.

    Args:
        gradients: what this rank has, for each parameter in the common order; None for no gradient.
        unfrozen: the parameters that require a gradient on this rank.
        buckets: how this rank would deal the parameters into buckets; the first rank's word counts.
        number: this rank's number for the optimizer; the first rank's counts.
        print_of_names: :func:`fingerprint` of this rank's names of the parameters.
        prints_of_forms: that of each parameter's shape and dtype on this rank.
        process_set: whose ranks take part.
        is_last: this rank has called ``step()`` and finds no further gradients in this step.

    Raises:
        ValueError: the parameters have different names on some ranks; all ranks get this.
        HorovodInternalError: the ranks have different numbers of parameters, or the world has ended.
    """
    is_first = member_index(process_set) == 0
    table = _table(gradients, unfrozen, buckets if is_first else (), prints_of_forms)
    ballot = _written(table, number if is_first else -1, print_of_names, is_last)
    handle = submit(
        Kind.ALLREDUCE,
        [ballot],
        process_set=process_set,
        name="DistributedOptimizer.census",
        in_place=True,
        op=ReduceOp.SUM,
        finish=lambda results: results[0],
        is_waited_for=True,
    )
    result: list[list[int]] = synchronize(handle).tolist()
    head, table = result[0], [row[_HEAD:] for row in result[1:]]
    if head[_FINGERPRINT] != head[_PRESENT] * print_of_names:
        raise ValueError(
            "the parameters of a DistributedOptimizer have different names on different ranks: make the same "
            "optimizers over the same model on all ranks, and step them in the same order"
        )
    return _read(head, table, prints_of_forms, num_members(process_set))


def _table(
    gradients: Sequence[Gradient | None],
    unfrozen: Collection[int],
    buckets: Sequence[Sequence[int]],
    prints_of_forms: Sequence[int],
) -> list[list[int]]:
    """What one rank says of each parameter: a row for each of the things above, a column for each parameter."""
    rows: list[list[int]] = [[0] * len(gradients) for _ in range(_PLACE + 1)]
    rows[_FORM][:] = prints_of_forms
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
        for place, member in enumerate(bucket):
            rows[_BUCKET][member] = index + 1
            rows[_PLACE][member] = place
    return rows


def _written(table: list[list[int]], number: int, print_of_names: int, is_last: bool) -> torch.Tensor:
    """One rank's word, int64 of shape (1 + rows, 4 + parameters); those of all ranks are added."""
    word = torch.zeros(1 + len(table), _HEAD + len(table[0]), dtype=torch.int64, device="cpu")
    word[0, :_HEAD] = torch.tensor([1, print_of_names, number + 1, int(is_last)], device="cpu")
    word[1:, _HEAD:] = torch.tensor(table, dtype=torch.int64, device="cpu").view(len(table), -1)
    return word


def _read(head: list[int], table: list[list[int]], prints_of_forms: Sequence[int], num_ranks: int) -> Census:
    dense = frozenset(index for index, count in enumerate(table[_DENSE]) if count)
    buckets: dict[int, list[tuple[int, int]]] = {}
    for index, (bucket, place) in enumerate(zip(table[_BUCKET], table[_PLACE], strict=True)):
        if bucket:
            buckets.setdefault(bucket, []).append((place, index))
    return Census(
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
        misfits=frozenset(
            index
            for index, own in enumerate(prints_of_forms)
            if table[_FORM][index] != head[_PRESENT] * own and (table[_DENSE][index] or table[_SPARSE][index])
        ),
        unfrozen=frozenset(index for index, count in enumerate(table[_UNFROZEN]) if count),
        buckets=[[index for _, index in sorted(buckets[bucket])] for bucket in sorted(buckets)],
        num_last=head[_LAST],
        num_present=head[_PRESENT],
    )
