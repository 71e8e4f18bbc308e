"""``horovod.data``: the base of data loaders of the user's own, and loading in advance in a thread."""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from hvd_cluster.data.at_exit import close_at_exit, forget

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether anybody still wants batches.
_LOOK_S = 0.1


class BaseDataLoader(ABC):
    """A loader says how many batches it has and how they are made; iterating gives them, processed."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of one iteration."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """The batches of one iteration."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """What becomes of a batch before it is handed out; nothing unless a subclass says otherwise."""
        return batch


class AsyncDataLoaderMixin:
    """Loads batches in advance, in a thread: ``class Mine(AsyncDataLoaderMixin, MyLoader)``, in this order.

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
        self._passes: list[_Pass] = []

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():  # type: ignore[attr-defined]
                yield self._process_batch(batch)  # type: ignore[attr-defined]
            return
        ahead = _Pass(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]
        self._passes.append(ahead)
        self._say("begins to load in advance")
        try:
            for batch in ahead:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            ahead.close()
            self._passes.remove(ahead)
            self._say("has ended its thread")

    def close_async_loader(self) -> None:
        """End the threads; an iteration in progress ends with the batches that are there."""
        for ahead in list(self._passes):
            ahead.close()

    def __enter__(self) -> Any:
        """The loader; the end of the ``with`` block ends its threads, also after an error."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_async_loader()

    def _say(self, text: str) -> None:
        if self.debug_data_loader:
            logger.warning("%s %s", type(self).__name__, text)


class _Pass:
    """One iteration over ``batches`` in a thread."""

    def __init__(self, batches: Iterator[Any], size: int) -> None:
        self._batches = batches
        self._queue: queue.Queue[tuple[bool, Any]] = queue.Queue(size)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._load, name="hvd-async-loader", daemon=True)
        close_at_exit(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            is_batch, value = self._queue.get()
            if not is_batch:
                if value is not None:
                    raise value
                return
            yield value

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread, and wait at most this long for the current batch; iterating then ends."""
        self._closed.set()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            forget(self)

    def _load(self) -> None:
        error: BaseException | None = None
        try:
            for batch in self._batches:
                if not self._put((True, batch)):
                    return
        except BaseException as caught:  # noqa: BLE001 - raised again where the batches are wanted
            error = caught
        finally:
            if hasattr(self._batches, "close"):
                self._batches.close()
            if not self._put((False, error)):
                self._make_room()

    def _put(self, entry: tuple[bool, Any]) -> bool:
        """Whether the entry was wanted."""
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False

    def _make_room(self) -> None:
        """Put the end where it is seen, in place of batches that are no longer wanted."""
        while True:
            try:
                self._queue.put_nowait((False, None))
            except queue.Full:
                self._queue.get_nowait()
            else:
                return
