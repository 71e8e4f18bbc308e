"""The batches of plans, one after the other, read ahead by threads.

A plan becomes chunks, blocks and batches.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, Protocol

from hvd_cluster.data.reading.block_buffer import BlockChunk, chunks_of
from hvd_cluster.data.reading.budget import Budget
from hvd_cluster.data.reading.interleave import interleave
from hvd_cluster.data.reading.read_ahead import ReadAhead
from hvd_cluster.data.reading.row_form import R, RowForm
from hvd_cluster.data.reading.shards import Block, ShardPlan
from hvd_cluster.data.schema import Schema


class Blocks(Protocol[R]):
    """Reads blocks, in one form of rows.

    Several threads may use it at once, once ``schema`` is known.
    """

    @property
    def schema(self) -> Schema:
        """The columns of the blocks."""

    @property
    def form(self) -> RowForm[R]:
        """The form of the rows."""

    def buffer(self, block: Block, num_chunks: int) -> Any:
        """What a block is put together in."""

    def read(self, buffer: Any, chunk: BlockChunk, stopped: Callable[[], bool]) -> None:
        """Read a chunk of a block, and put the rows that the rank takes into the buffer."""


class Pass(Generic[R]):
    """One plan on its way to batches. Several threads may read it at once."""

    def __init__(self, plan: ShardPlan, blocks: Blocks[R], budget: Budget) -> None:
        self.plan = plan
        self._blocks = blocks
        cut = [chunks_of(block, budget.chunk_bytes, budget.row_bytes) for block in plan.blocks]
        self._num_chunks = [len(chunks) for chunks in cut]
        self._buffers = {number: blocks.buffer(plan.blocks[number], len(chunks)) for number, chunks in enumerate(cut)}
        #: What to read: number of the block, and a chunk of it.
        self.work = [(number, chunk) for number, chunks in enumerate(cut) for chunk in chunks]

    def read(self, number: int, chunk: BlockChunk, stopped: Callable[[], bool]) -> None:
        """Read a piece of the work."""
        self._blocks.read(self._buffers[number], chunk, stopped)

    def batches(self, wait: Callable[[], None]) -> Generator[R, None, None]:
        """The batch of each step.

        Args:
            wait: returns when the next piece of the work, in their order, has been read; raises what went wrong.
        """
        numbers = iter(range(len(self._num_chunks)))

        def take() -> R:
            number = next(numbers)
            for _ in range(self._num_chunks[number]):
                wait()
            return self._buffers.pop(number).complete(self._blocks.schema.names)  # type: ignore[no-any-return]

        return interleave(self.plan, take, self._blocks.form)


class Pipeline(Generic[R]):
    """Goes through plans.

    The first rows of a plan are read while the last batches of the one before are taken. Closing it ends its threads.
    """

    def __init__(self, plans: Iterable[ShardPlan], blocks: Blocks[R], budget: Budget) -> None:
        lock = threading.Lock()  # a thread or the consumer asks for a pass first
        mine, theirs = itertools.tee(Pass(plan, blocks, budget) for plan in plans)
        self._passes = _locked(mine, lock)
        _ = blocks.schema  # once, before the threads need it
        work: dict[int, tuple[Pass[R], int, BlockChunk]] = {}

        def sizes() -> Iterator[int]:
            pieces = itertools.count()
            for made in _locked(theirs, lock):
                for block, chunk in made.work:
                    work[next(pieces)] = made, block, chunk
                    yield chunk.rows * budget.row_bytes

        def read(piece: int, stopped: Callable[[], bool]) -> None:
            made, block, chunk = work.pop(piece)
            made.read(block, chunk, stopped)

        self._ahead: ReadAhead[None] = ReadAhead(read, sizes(), budget.num_threads, budget.prefetch_bytes)

    @property
    def alive(self) -> bool:
        """Whether its threads are of this process."""
        return self._ahead.alive

    def next_pass(self) -> tuple[ShardPlan, Generator[R, None, None]]:
        """The next plan and its batches; exhaust these before the next call.

        Raises:
            StopIteration: there is no further plan.
        """
        made = next(self._passes)
        return made.plan, made.batches(self._ahead.take)

    def close(self) -> None:
        """End the threads and wait for them; at most the pieces under way are finished."""
        self._ahead.close()


def _locked(passes: Iterator[Pass[R]], lock: threading.Lock) -> Iterator[Pass[R]]:
    """The same, when several threads may take from what it is taken from."""
    while True:
        with lock:
            made = next(passes, None)
        if made is None:
            return
        yield made
