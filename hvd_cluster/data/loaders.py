"""``horovod.data``: the base class of data loaders, and loading in a thread."""

from __future__ import annotations

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from hvd_cluster.data.reading.read_ahead import ReadAhead, ReadAheadClosedError
from hvd_cluster.monitor.step_clock import DATA, step_clock
from hvd_cluster.monitor.timed_calls import timed_items

logger = logging.getLogger(__name__)


class BaseDataLoader(ABC):
    """A loader, whose iteration yields processed batches.

    Subclasses define how many batches there are and how to make them.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Batches of one iteration."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """The batches of one iteration."""

    def __iter__(self) -> Iterator[Any]:
        for batch in timed_items(self._iterate()):
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Hook for subclasses: returns what is yielded in place of a batch."""
        return batch


class AsyncDataLoaderMixin:
    """Loads batches in advance, in a thread.

    Use it as ``class Mine(AsyncDataLoaderMixin, MyLoader)``, in this order.

    Args:
        async_loader_queue_size: batches that may wait; 0 loads in the thread that iterates.
        debug_data_loader: log what happens.
        args, kwargs: for the loader's own constructor.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._passes: list[ReadAhead[Any]] = []

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in timed_items(self._iterate()):  # type: ignore[attr-defined]
                yield self._process_batch(batch)  # type: ignore[attr-defined]
            return
        batches = iter(self._iterate())  # type: ignore[attr-defined]
        ended = threading.Event()

        def load(_number: int, _stopped: Callable[[], bool]) -> Any:
            try:
                return next(batches)
            except BaseException:  # raised again: some iterators start again when asked after it
                ended.set()
                raise

        sizes = itertools.takewhile(lambda _size: not ended.is_set(), itertools.repeat(1))
        # Beside the batches that wait, one may be loading.
        ahead = ReadAhead(load, sizes, 1, self.async_loader_queue_size + 1, "hvd-async-loader")
        self._passes.append(ahead)
        self._log("begins to load in advance")
        try:
            while True:
                try:
                    with step_clock.span(DATA):
                        batch = ahead.take()
                except StopIteration:
                    return
                except ReadAheadClosedError:
                    if ahead.is_closed:
                        return
                    raise  # what the loader reads from was closed
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            ahead.close()
            self._passes.remove(ahead)
            if hasattr(batches, "close"):  # a generator, or an iterator of the user's with resources
                batches.close()
            self._log("has ended its thread")

    def close_async_loader(self) -> None:
        """End the threads and the iterations in progress."""
        for ahead in list(self._passes):
            ahead.close()

    def __enter__(self) -> Any:
        """The loader.

        The end of the ``with`` block ends its threads, also after an error.
        """
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_async_loader()

    def _log(self, text: str) -> None:
        if self.debug_data_loader:
            logger.warning("%s %s", type(self).__name__, text)
