"""What a call of a process group returns: torch's Work over a handle of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.request import Handle

#: torch's "no timeout" of ``Work.wait()``.
_NO_TIMEOUT = timedelta(0)
#: One thread completes all futures, unless a continuation waits for another future: then others take over.
_MAX_THREADS = 64


class HandleWork(dist.Work):
    """One call in progress.

    ``wait()`` advances the engine in the calling thread. The future of ``get_future()`` is completed by a thread of its
    own, because its continuations run user code, which may wait for other calls.

    Args:
        handle: gives the outcome.
        results: the tensors that hold the results when it is done.
        source: returns the group rank that a receive got its message from.
    """

    def __init__(self, handle: Handle, results: list[torch.Tensor], source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._handle = handle
        self._results = results
        self._source = source
        self._future: Any = None

    def is_completed(self) -> bool:
        self._kick()
        return self._handle.done

    def is_success(self) -> bool:
        return self.is_completed() and self._handle.error is None

    def exception(self) -> Exception | None:
        return self._handle.error

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the call is done; on a GPU, when it is launched and the current stream waits for it.

        Raises:
            HorovodInternalError: the call failed.
            RuntimeError: it is not done within ``timeout``; it stays in progress.
        """
        if timeout > _NO_TIMEOUT:
            self._kick()
            if not self._handle.settles_within(timeout.total_seconds()):
                raise RuntimeError(f"the operation was not done within {timeout.total_seconds():g} s, as wait() asked")
        self._handle.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def source_rank(self) -> int:
        return -1 if self._source is None else self._source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The future that gets the results; equal at each call."""
        if self._future is None:
            gpus: Any = list({tensor.device for tensor in self._results if tensor.is_cuda})
            promise: torch.futures.Future[None] = torch.futures.Future(devices=gpus or None)
            # torch's C++ sees an error only if a continuation raises it.
            self._future = promise.then(self._results_or_raise)
            self._kick()
            if self._handle.settled():
                self._complete(promise)
            else:
                self._handle.on_settled(partial(_completions.put, partial(self._complete, promise)))
        future: torch.futures.Future[list[torch.Tensor]] = self._future
        return future

    def _kick(self) -> None:
        """Have the call negotiated, if it was submitted by a thread that was to wait for it at once."""
        if not self._handle.settled():
            running_engine().expedite()

    def _complete(self, promise: torch.futures.Future[None]) -> None:
        if self._handle.error is None:
            self._handle.wait()  # on a GPU: the stream of this thread waits, on which the future records its event
        promise.set_result(None)

    def _results_or_raise(self, _: object) -> list[torch.Tensor]:
        self._handle.wait()
        return self._results


class AllOf(dist.Work):
    """Several calls as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:  # each of them, unlike all()
            work.wait(timeout)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class _Completions:
    """Threads that complete futures; they exist while a process group does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def put(self, complete: Callable[[], None]) -> None:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_MAX_THREADS, "hvd-futures")
            self._threads.submit(complete)

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


_completions = _Completions()


def end_completions() -> None:
    """Release the threads that complete futures, when what they do now is done."""
    _completions.close()
