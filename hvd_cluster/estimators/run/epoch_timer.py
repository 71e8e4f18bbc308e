"""A clock for an epoch, and for the part of it that was spent waiting for batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class EpochTimer:
    """Begins when it is made."""

    def __init__(self) -> None:
        #: Rows that were trained on; whoever trains counts them here.
        self.rows = 0
        self._start_s = time.perf_counter()
        self._waited_s = 0.0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until each of them comes counts as waiting."""
        iterator = iter(batches)
        while True:
            try:
                with self.waiting():
                    batch = next(iterator)
            except StopIteration:
                return
            yield batch

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time within counts as waiting."""
        asked_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - asked_s

    @property
    def seconds(self) -> float:
        """How long the epoch has lasted."""
        return time.perf_counter() - self._start_s

    @property
    def rows_per_s(self) -> float:
        """Rows of this rank."""
        return self.rows / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        """Waiting as a part of the epoch, between 0 and 1."""
        return self._waited_s / max(self.seconds, 1e-9)
