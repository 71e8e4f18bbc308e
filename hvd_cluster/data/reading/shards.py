"""Which rank reads which row when.

A pure function of numbers, which every rank computes alike.

The order of an epoch
---------------------
1. *Line*: the split's row groups one after the other, as RowGroups in the order of the data, or permuted by (seed,
   epoch). N rows.
2. *Lanes*: the line is cut into L contiguous pieces of equal length (the first N mod L have one row more). L is 1
   where all rows fit one window: then the order does not depend on how the data was cut into row groups, nor for how
   many workers. Elsewhere L is ``split.lanes``.
3. *Windows*: consecutive row ranges of a lane, up to ``window_rows`` rows (one range may be longer). The rows of a
   window are permuted by (seed, epoch, lane, window).
4. *Interleaving*: position i of the epoch's order is element ``i // L`` of lane ``i mod L``.

Nothing of this knows the rank or the number of ranks. With b rows per rank and step, step t of R ranks takes the
positions ``[t*b*R, (t+1)*b*R)`` (the global batch), and of those rank r the ones with ``i mod R == r``. So R ranks
with batch b and one rank with batch b*R see the same rows in step t, and when R is a multiple or a divisor of L, a
rank reads the row groups of its own lanes only. Fewer row groups than ranks is not a special case: lanes cut inside row
groups.

Permutations come from NumPy's legacy generator, whose stream is frozen (NEP 19), so ranks with different NumPy
versions agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.dataset import Split
from hvd_cluster.data.row_group import RowGroup

#: What happens to the rows that do not fill the last global batch.
#:
#: "drop": they are left out; other ones in the next epoch when rows are shuffled.
#: "pad": the last global batch is filled up with rows that are seen a second time: each lane starts again at its first.
#: "partial": the last global batch is smaller; ranks get rows of it in turn, some perhaps none (empty tensors).
#: "uneven": the same, but a rank without a row in the last step does not have that step (for ``hvd.join``).
Remainder = Literal["drop", "pad", "partial", "uneven"]
REMAINDERS = ("drop", "pad", "partial", "uneven")

#: Rows per shuffle window where the caller does not derive it from a size in bytes.
WINDOW_ROWS = 1 << 18


@dataclass(frozen=True)
class RowRange:
    """A contiguous piece of a row group."""

    #: The row group (or the piece of one) that it lies in.
    row_group: RowGroup
    #: First row, counted from ``row_group.start``.
    start: int
    #: One past the last row, counted alike.
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows, >= 1."""
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """Rows of one window that one rank takes, one after the other.

    The unit that the reader reads and shuffles.
    """

    #: What to read, in this order: the window.
    ranges: tuple[RowRange, ...]
    #: Which of the rank's lanes it belongs to, an index below ``ShardPlan.num_slots``.
    slot: int
    #: Rows that the rank takes, >= 1.
    rows: int
    #: The rank's row number of the first of them: block order is by this.
    first: int
    #: Index in the window's order of the first row taken, and the distance to the next.
    offset: int
    stride: int
    #: Seeds of the window's permutation; None keeps the order of the data.
    seeds: tuple[int, ...] | None

    @property
    def window_rows(self) -> int:
        """Rows of the whole window."""
        return sum(piece.rows for piece in self.ranges)

    def order(self) -> npt.NDArray[np.int64]:
        """Indices into the concatenated ranges, as the rank takes the rows.

        The shape is (rows,).
        """
        stop = self.offset + self.rows * self.stride
        if self.seeds is None:
            return np.arange(self.offset, stop, self.stride, dtype=np.int64)
        return np.ascontiguousarray(permutation(self.window_rows, self.seeds)[self.offset : stop : self.stride])


@dataclass(frozen=True)
class ShardPlan:
    """What one rank reads in one epoch.

    Rows are numbered by the order in which the rank takes them: step t takes the rows ``[t*batch_size,
    (t+1)*batch_size)`` that exist. Row m belongs to slot ``m % num_slots``.
    """

    #: Steps of the plan, the same on every rank; with "uneven" one less on a rank that gets no row in the last step.
    steps: int
    #: Rows of this rank in a full step.
    batch_size: int
    #: This rank and the number of ranks.
    rank: int
    size: int
    #: Rows of the split, over all ranks.
    split_rows: int
    #: The position in the epoch's order, over all ranks, at which the plan begins.
    begin: int
    #: Rows that this rank takes from there on, repeated ones included.
    rows: int
    #: Rows that all ranks together see twice (only with "pad"), and leave out (only with "drop").
    num_repeated: int
    num_dropped: int
    #: Lanes that this rank's rows come from, in turn.
    num_slots: int
    #: What to read, sorted by when it is first needed.
    blocks: tuple[Block, ...]

    def rows_in(self, step: int) -> int:
        """This rank's rows in a step; below ``batch_size`` in the last step only."""
        return max(0, min(self.rows, (step + 1) * self.batch_size) - step * self.batch_size)

    def fresh_in(self, step: int) -> int:
        """The rows of a rank's batch that are new in this epoch; they come first.

        The other rows are padding.
        """
        positions = self.split_rows - self.position_at(step) - self.rank
        return max(0, min(self.rows_in(step), -(-positions // self.size)))

    def position_at(self, step: int) -> int:
        """The position in the epoch's order, over all ranks, at which a step begins."""
        return self.begin + step * self.batch_size * self.size


def num_steps(rows: int, batch_size: int, size: int, remainder: Remainder) -> int:
    """Steps for this many rows: rounded down for "drop", up otherwise.

    A step takes ``batch_size * size`` rows.
    """
    global_batch = batch_size * size
    return rows // global_batch if remainder == "drop" else -(-rows // global_batch)


def plan(
    split: Split,
    rank: int,
    size: int,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    remainder: Remainder = "drop",
    window_rows: int = WINDOW_ROWS,
    begin: int = 0,
) -> ShardPlan:
    """Work out what a rank reads in an epoch, or in the rest of one.

    The module's docstring says by which rule.

    Args:
        split: the rows; their order does not depend on any of rank, size and batch_size.
        rank, size: this rank, and the number of ranks.
        batch_size: rows per rank and step.
        seed, epoch: choose the order; any integers.
        shuffle: False keeps the order of the data within each lane (with one lane: the order of the data).
        remainder: what happens to the rows that do not fill the last global batch.
        window_rows: rows that are shuffled among each other at a time.
        begin: the position in the epoch's order, over all ranks, to begin at; what lies before it is not read.
    """
    if not 0 <= rank < size or batch_size < 1 or window_rows < 1 or begin < 0 or remainder not in REMAINDERS:
        raise ValueError(
            f"no plan for rank {rank} of {size}, batch_size {batch_size}, window_rows {window_rows}, begin {begin}, "
            f"remainder {remainder!r}"
        )
    n = split.rows
    begin = min(begin, n)
    steps = num_steps(n - begin, batch_size, size, remainder)
    end = n if remainder in {"partial", "uneven"} else begin + steps * batch_size * size
    whole = n <= window_rows
    num_lanes = 1 if whole else min(split.lanes, n)
    line = list(split.row_groups)
    if shuffle and not whole:
        line = [line[index] for index in permutation(len(line), (seed, epoch))]
    lanes = _cut(line, [n // num_lanes + (lane < n % num_lanes) for lane in range(num_lanes)])
    # Positions first, first + size, first + 2*size, ... fall on this many lanes in turn.
    first = begin + rank
    num_slots = num_lanes // math.gcd(num_lanes, size)
    rows = len(range(first, end, size))
    blocks: list[Block] = []
    for slot in range(num_slots):
        # The slot's k-th row is element `element + k*stride` of the lane.
        element, lane = divmod(first + size * slot, num_lanes)
        stride = size // math.gcd(num_lanes, size)
        windows = _windows(lanes[lane], window_rows)
        for k, count, offset, index in _visits(
            [sum(r.rows for r in w) for w in windows], element, stride, len(range(slot, rows, num_slots))
        ):
            seeds = (seed, epoch, lane, index) if shuffle else None
            blocks.append(Block(tuple(windows[index]), slot, count, slot + k * num_slots, offset, stride, seeds))
    blocks.sort(key=lambda block: block.first)
    return ShardPlan(
        steps=-(-rows // batch_size) if remainder == "uneven" else steps,
        batch_size=batch_size,
        rank=rank,
        size=size,
        split_rows=n,
        begin=begin,
        rows=rows,
        num_repeated=max(0, end - n),
        num_dropped=max(0, n - end),
        num_slots=num_slots,
        blocks=tuple(blocks),
    )


def permutation(n: int, seeds: Sequence[int]) -> npt.NDArray[np.int64]:
    """A permutation of ``range(n)`` chosen by whole numbers.

    It is the same in every version of NumPy.
    """
    words = [word for seed in seeds for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)]
    return np.random.RandomState(words).permutation(n).astype(np.int64, copy=False)


def _cut(line: Sequence[RowGroup], lengths: Sequence[int]) -> list[list[RowRange]]:
    """Cut row groups, laid one after the other, into pieces of these lengths."""
    pieces: list[list[RowRange]] = []
    at, start = 0, 0  # the row group, and the row in it, where the next piece begins
    for length in lengths:
        piece: list[RowRange] = []
        while length:
            stop = min(line[at].rows, start + length)
            if stop > start:
                piece.append(RowRange(line[at], start, stop))
            length -= stop - start
            at, start = (at + 1, 0) if stop == line[at].rows else (at, stop)
        pieces.append(piece)
    return pieces


def _windows(ranges: Sequence[RowRange], window_rows: int) -> list[list[RowRange]]:
    """Group consecutive ranges into windows of at most ``window_rows`` rows.

    A longer range is a window of its own.
    """
    windows: list[list[RowRange]] = []
    room = 0
    for piece in ranges:
        if not windows or piece.rows > room:
            windows.append([])
            room = window_rows
        windows[-1].append(piece)
        room -= piece.rows
    return windows


def _visits(lengths: Sequence[int], first: int, stride: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Where every ``stride``-th element falls on windows of these lengths.

    The elements are ``first + k*stride``, k in ``range(count)``; the windows lie end to end. Past the last window the
    first one follows again.

    Yields:
        (k of the first element, number of elements, offset of the first one in the window, index of the window);
        windows without an element are left out.
    """
    k, begin, index = 0, 0, 0
    while k < count:
        offset = first + k * stride - begin
        inside = min(count - k, len(range(offset, lengths[index], stride)))
        if inside:
            yield k, inside, offset, index
            k += inside
        begin += lengths[index]
        index = (index + 1) % len(lengths)
