"""Which fragments a shard reads, and in which order.

A pure function of the fragments, the seed and the epoch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_cluster.data.reading.shards import permutation
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.errors import NoDataAvailableError
from hvd_cluster.petastorm.fragments import Fragment

#: Keeps the draws of shards, of fragments and of rows apart.
_SHARDS, _PIECES, _ROWS = 1, 2, 3


def shard_of(
    fragments: Sequence[Fragment], cur_shard: int | None, shard_count: int | None, seed: int | None
) -> list[Fragment]:
    """The fragments of one shard: whole row groups, distributed in turn.

    Args:
        fragments: of the data set, the same and in the same order for every shard.
        cur_shard, shard_count: this shard of how many; None for both reads everything.
        seed: shuffles the row groups before they are distributed; None keeps the order of the data.

    Raises:
        DataError: the numbers make no sense.
        NoDataAvailableError: a shard would get nothing.
    """
    if cur_shard is None and shard_count is None:
        return list(fragments)
    if cur_shard is None or shard_count is None or not 0 <= cur_shard < shard_count:
        raise DataError(
            f"cur_shard is {cur_shard!r} and shard_count {shard_count!r}: give both, with 0 <= cur_shard < shard_count"
        )
    numbers = sorted({fragment.number for fragment in fragments})
    if len(numbers) < shard_count:
        raise NoDataAvailableError(
            f"{len(numbers)} row groups cannot be shared by {shard_count} shards: write the data with more row groups "
            "(a smaller row_group_size_mb, or more partitions), or read it with hvd_cluster.data.reader, which shares "
            "rows"
        )
    if seed is not None:
        numbers = [numbers[index] for index in permutation(len(numbers), (seed, _SHARDS))]
    mine = set(numbers[cur_shard::shard_count])
    return [fragment for fragment in fragments if fragment.number in mine]


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The fragments of all epochs, one epoch after the other."""

    #: Of one epoch, in the order of the data.
    fragments: tuple[Fragment, ...]
    #: None for no end.
    num_epochs: int | None
    #: Chooses the orders.
    seed: int
    #: Whether each epoch has an order of its own.
    shuffle_fragments: bool
    #: Whether the rows of a fragment are put in another order too.
    shuffle_rows: bool
    #: Number of the first epoch.
    first_epoch: int = 0

    @property
    def count(self) -> int:
        """Fragments over all epochs."""
        return sys.maxsize if self.num_epochs is None else len(self.fragments) * self.num_epochs

    def fragment(self, index: int) -> Fragment:
        """The fragment at a place, counted over all epochs."""
        epoch, place = self._place(index)
        return self.fragments[
            _permutation(len(self.fragments), self.seed, epoch)[place] if self.shuffle_fragments else place
        ]

    def row_seeds(self, index: int) -> tuple[int, ...] | None:
        """The seeds of the permutation of a fragment's rows; None for their own order."""
        epoch, place = self._place(index)
        return (self.seed, _ROWS, epoch, place) if self.shuffle_rows else None

    def after(self) -> EpochOrder:
        """The same number of epochs, following these."""
        return replace(self, first_epoch=self.first_epoch + (self.num_epochs or 0))

    def _place(self, index: int) -> tuple[int, int]:
        epoch, place = divmod(index, len(self.fragments))
        return self.first_epoch + epoch, place


@functools.lru_cache(maxsize=16)
def _permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(permutation(count, (seed, _PIECES, epoch)).tolist())
