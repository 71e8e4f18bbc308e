"""The batches of a plan, read ahead by threads: plan -> chunks -> blocks -> batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvd_cluster.data.reading.assembly import Assembly, chunks_of
from hvd_cluster.data.reading.blocks import BlockReader
from hvd_cluster.data.reading.read_ahead import ReadAhead
from hvd_cluster.data.reading.shards import ShardPlan
from hvd_cluster.data.reading.weave import Batch, weave


def batches(
    plan: ShardPlan,
    blocks: BlockReader,
    *,
    row_bytes: int,
    chunk_rows: int,
    num_threads: int,
    prefetch_bytes: int,
) -> Iterator[Batch]:
    """Read what a plan says.

    Closing the iterator, or dropping it, ends its threads.

    Args:
        plan: the rank's plan.
        blocks: reads its blocks.
        row_bytes: size of a row, for the bound.
        chunk_rows: rows that one thread reads at one go.
        num_threads: threads that read.
        prefetch_bytes: bound of what has been read and not yet been taken.

    Yields:
        The batch of each step.
    """
    if not plan.steps:
        return
    schema = blocks.schema  # once, before the threads need it
    cut = [chunks_of(block, chunk_rows) for block in plan.blocks]
    assemblies = {number: Assembly(plan.blocks[number], len(chunks)) for number, chunks in enumerate(cut)}
    work = [(number, chunk) for number, chunks in enumerate(cut) for chunk in chunks]

    def read(index: int, stopped: Callable[[], bool]) -> None:
        number, chunk = work[index]
        blocks.read(assemblies[number], chunk, stopped)

    sizes = [chunk.rows * row_bytes for _, chunk in work]
    ahead: ReadAhead[None] = ReadAhead(read, sizes, num_threads, prefetch_bytes)
    numbers = iter(range(len(cut)))

    def take() -> Batch:
        number = next(numbers)
        for _ in cut[number]:
            ahead.take()
        return assemblies.pop(number).complete(schema.names)

    try:
        yield from weave(plan, take, schema)
    finally:
        ahead.close()
