"""Where a rank's Parquet reader runs, by ``reader_pool_type``: in threads of the worker, or in a reader process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from hvd_cluster.data.cache import MemoryCache

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_cluster.data.dataset import Dataset
    from hvd_cluster.data.reader import ParquetReader

#: ``inmemory_cache_all`` has no limit.
_ALL_BYTES = 1 << 62
_UINT64 = (1 << 64) - 1


def options_of_pool(pool_type: str, num_threads: int, in_memory: bool) -> dict[str, Any]:
    """Arguments of a ``ParquetReader`` for a ``reader_pool_type``.

    Args:
        num_threads: the number of threads; "dummy" always has one.
        in_memory: keep rows in memory. No effect for "process": a reader process ends after one pass.
    """
    return {
        "num_threads": 1 if pool_type == "dummy" else num_threads,
        "cache": MemoryCache(_ALL_BYTES) if in_memory and pool_type != "process" else None,
    }


def start_method_of(wanted: str | None, dataset: Dataset) -> str | None:
    """How a reader process starts: as the user wants, but not by a fork if the data's library cannot be forked."""
    parts = [part for part in (dataset.train, dataset.validation) if part is not None]
    can_fork = all(part.reader is None or part.reader.can_fork for part in parts)
    return "spawn" if wanted == "fork" and not can_fork else wanted


def one_pass(
    reader: ParquetReader,
    epoch: int,
    start: int,
    pool_type: str,
    start_method: str | None,
    *,
    seed: int,
    rank: int,
) -> Iterator[dict[str, Tensor]]:
    """One pass over the rows from its ``start``-th batch on, in this process or, for "process", in a reader process.

    A reader process has its own random numbers in each pass and on each rank, equal in a repeated run.
    """
    if pool_type != "process":
        return reader.epoch(epoch, start)
    loader = DataLoader(
        _Pass(reader, epoch, start),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=start_method or "spawn",
        # Otherwise the seed is drawn from the model's generator, and a run that resumes within a pass differs.
        generator=torch.Generator().manual_seed(_pass_seed(seed, epoch, rank, start)),
    )
    return iter(loader)


def _pass_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence([number & _UINT64 for number in numbers]).generate_state(1, np.uint64)[0])


class _Pass(IterableDataset[Any]):
    """One pass as a torch data set for a reader process."""

    def __init__(self, reader: ParquetReader, epoch: int, start: int) -> None:
        self._reader, self._epoch, self._start = reader, epoch, start

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the user's functions by value."""
        return _unpacked, (cloudpickle.dumps((self._reader, self._epoch, self._start)),)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._reader.epoch(self._epoch, self._start)


def _unpacked(blob: bytes) -> _Pass:
    return _Pass(*cloudpickle.loads(blob))
