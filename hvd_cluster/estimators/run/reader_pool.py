"""Where a Parquet reader runs, by ``reader_pool_type``: in threads or a process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hvd_cluster.data.cache import MemoryCache

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_cluster.data.dataset import Dataset as TrainingData
    from hvd_cluster.data.reader import ParquetReader

#: ``inmemory_cache_all`` has no limit.
_ALL_BYTES = 1 << 62
_UINT64 = (1 << 64) - 1


class PassReader(Protocol):
    """A ``ParquetReader``, or one in a reader process."""

    @property
    def steps(self) -> int:
        """Batches of an epoch."""

    def epoch(self, epoch: int, start_step: int = 0, /) -> Iterator[dict[str, Tensor]]:
        """The batches of an epoch from ``start_step`` on; ends an earlier iteration."""

    def close(self) -> None:
        """End the threads, or the process."""


def batches_from(reader: PassReader, at: int, count: int) -> Iterator[dict[str, Tensor]]:
    """``count`` batches from the ``at``-th on; the next pass continues an ended one."""
    end = at + count
    while at < end:
        through, offset = divmod(at, reader.steps)
        taken = min(reader.steps - offset, end - at)
        # A pass that starts after the first row fills its last batch like a complete pass.
        yield from itertools.islice(reader.epoch(through, offset), taken)
        at += taken


def options_of_pool(pool_type: str, num_threads: int, in_memory: bool) -> dict[str, Any]:
    """Arguments of a ``ParquetReader`` for a ``reader_pool_type``.

    Args:
        num_threads: the number of threads; "dummy" always has one.
        in_memory: keep rows in memory.
    """
    return {
        "num_threads": 1 if pool_type == "dummy" else num_threads,
        "cache": MemoryCache(_ALL_BYTES) if in_memory else None,
    }


def in_pool(reader: ParquetReader, pool_type: str, start_method: str | None, *, seed: int, rank: int) -> PassReader:
    """The reader itself or, for "process", a process that runs it."""
    return _ReaderProcess(reader, start_method, seed, rank) if pool_type == "process" else reader


def start_method_of(wanted: str | None, dataset: TrainingData) -> str | None:
    """How a reader process starts: as wanted, unless the data's library cannot fork."""
    parts = [part for part in (dataset.train, dataset.validation) if part is not None]
    can_fork = all(part.reader is None or part.reader.can_fork for part in parts)
    return "spawn" if wanted == "fork" and not can_fork else wanted


class _Pass(NamedTuple):
    #: Counts the passes of a reader.
    number: int
    epoch: int
    start_step: int
    seed: int


class _Requests:
    """What the loader asks the process for next."""

    def __init__(self) -> None:
        self.upcoming: Iterator[_Pass] = iter(())

    def __iter__(self) -> Iterator[_Pass]:
        return self.upcoming


class _ReaderProcess:
    """Reads in a process that begins with the first pass and stays for all of them.

    It has its own random numbers in each pass and on each rank, equal in a repeated run.
    """

    def __init__(self, reader: ParquetReader, start_method: str | None, seed: int, rank: int) -> None:
        self.steps = reader.steps
        self._seeds = (seed, rank)
        self._num_passes = 0
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = DataLoader(
            _Passes(reader),
            batch_size=None,
            sampler=self._requests,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context=start_method or "spawn",
            generator=torch.Generator(),  # by default it takes a number from the model's generator
        )

    def epoch(self, epoch: int, start_step: int = 0, /) -> Iterator[dict[str, Tensor]]:
        assert self._loader is not None
        seed, rank = self._seeds
        self._num_passes += 1
        wanted = _Pass(self._num_passes, epoch, start_step, _pass_seed(seed, epoch, rank, start_step))
        self._requests.upcoming = itertools.repeat(wanted, self.steps - start_step)
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None


def _pass_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence([number & _UINT64 for number in numbers]).generate_state(1, np.uint64)[0])


class _Passes(Dataset[Any]):
    """The passes of a reader as a torch data set, for a reader process."""

    def __init__(self, reader: ParquetReader) -> None:
        self._reader = reader
        self._number = 0
        self._batches: Iterator[dict[str, Tensor]] = iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the user's functions by value."""
        return _unpacked, (cloudpickle.dumps(self._reader),)

    def __getitem__(self, wanted: _Pass) -> dict[str, Tensor]:
        """The next batch of a pass."""
        if wanted.number != self._number:
            self._number = wanted.number
            self._reader.close()
            random.seed(wanted.seed)
            np.random.seed(np.random.SeedSequence(wanted.seed).generate_state(4))
            torch.manual_seed(wanted.seed)
            self._batches = self._reader.epoch(wanted.epoch, wanted.start_step)
        return next(self._batches)


def _unpacked(blob: bytes) -> _Passes:
    return _Passes(cloudpickle.loads(blob))
