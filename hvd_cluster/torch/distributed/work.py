"""What a call of a process group returns: torch's Work over an engine's handle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.streams import OwnStreams, on_streams
from hvd_cluster.torch.distributed.backward_wait import in_training_thread, note_call
from hvd_cluster.torch.distributed.calls import Call
from hvd_cluster.torch.distributed.futures import CallFuture, CallName, is_in_continuation

#: torch's "no timeout" of ``Work.wait()``.
_NO_TIMEOUT = timedelta(0)
#: Held while a future is made, which several threads may ask for.
_lock = threading.Lock()
#: Futures are complete on these. On the stream on which a program computes, its kernels would wait for the calls too.
_streams = OwnStreams()
#: One thread completes all futures, unless continuations wait for others: then each of those occupies one.
_MAX_THREADS = 4096


class HandleWork(dist.Work):
    """One call in progress.

    ``wait()`` advances the engine in the calling thread. The future of ``get_future()`` is completed there if the call
    is done by then, else by a thread of its own, because continuations run user code, which may wait for other calls.

    Args:
        handle: gives the outcome.
        results: the tensors that hold the results when it is done.
        source: returns the group rank that a receive got its message from.
        call: names the continuations of the future.
        finish: makes the results of the value of the handle, before the future is completed; it may wait for a GPU.
    """

    def __init__(
        self,
        handle: Handle,
        results: list[torch.Tensor],
        source: Callable[[], int] | None = None,
        *,
        call: Call | None = None,
        finish: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._results = results
        self._source = source
        self._call = call
        self._finish = finish
        self._future: CallFuture | None = None

    def is_completed(self) -> bool:
        self._kick()
        return self._handle.done and (self._finish is None or self.get_future().done())

    def is_success(self) -> bool:
        return self.is_completed() and self._handle.error is None

    def exception(self) -> Exception | None:
        return self._handle.error

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the call is done.

        On a GPU, that is when it is launched and the current stream waits for it.

        Raises:
            HorovodInternalError: the call failed.
            RuntimeError: it is not done within ``timeout``; it stays in progress.
        """
        if timeout > _NO_TIMEOUT:
            self._kick()
            if not self._handle.settles_within(timeout.total_seconds()):
                raise RuntimeError(f"the operation was not done within {timeout.total_seconds():g} s, as wait() asked")
        with in_training_thread():
            self._handle.wait()
        if self._finish is not None:
            self.get_future().wait()
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

    @property
    def name(self) -> CallName | None:
        """The name of the call, equal on all ranks; None for messages between two ranks."""
        return None if self._call is None else self._call.name

    @property
    def gpus(self) -> set[torch.device]:
        """Where the results are, if not on the CPU."""
        return {tensor.device for tensor in self._results if tensor.is_cuda}

    def get_future(self) -> CallFuture:
        """The future that gets the results; equal at each call."""
        with _lock:
            future = self._future
            if future is not None:
                return future
            future = self._future = CallFuture(self.name, [*self.gpus], self._handle)
        try:
            self._advance()
        finally:  # also if a signal handler raises: the future is known already
            complete = partial(self._complete, future)
            if self._handle.settled():
                complete()
            else:
                self._handle.on_settled(partial(_completions.put, complete))
        return future

    def _advance(self) -> None:
        if self._handle.settled():
            return
        note_call(self._handle)
        engine = running_engine()
        engine.expedite()
        # In a continuation it would complete the next future, whose continuation would be called from this one.
        if not self.gpus and not is_in_continuation():
            engine.progress_briefly(self._handle)

    def _kick(self) -> None:
        """Have a call negotiated whose thread was to wait for it at once."""
        if not self._handle.settled():
            running_engine().expedite()

    def _complete(self, future: CallFuture) -> None:
        # The future records its event on the current streams, and its continuations run on the current GPU.
        with on_streams([_streams[gpu] for gpu in self.gpus]):
            try:
                value = self._handle.wait()
                if self._finish is not None:
                    self._finish(value)
            except Exception as error:  # noqa: BLE001 - the future hands it to those who wait
                future.fail(error.with_traceback(None))
            else:
                future.set_result(self._results)


class AllOf(dist.Work):
    """Several calls as one."""

    def __init__(self, works: list[HandleWork]) -> None:
        super().__init__()
        self._works = works
        self._future: CallFuture | None = None

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:  # each of them, unlike all()
            work.wait(timeout)
        return True

    def get_future(self) -> CallFuture:
        """The future that gets the results of all calls; equal at each call."""
        futures: list[Any] = [work.get_future() for work in self._works]
        with _lock:
            future = self._future
            if future is not None:
                return future
            first = self._works[0].name if self._works else None
            name = None if first is None else replace(first, text=f"all from {first.text}")
            future = self._future = CallFuture(name, [*{gpu for work in self._works for gpu in work.gpus}])
        torch.futures.collect_all(futures).add_done_callback(partial(self._gather, future, futures))
        return future

    @staticmethod
    def _gather(future: CallFuture, futures: list[Any], _: object) -> None:
        try:
            results = [tensor for each in futures for tensor in each.wait()]  # also the stream waits
        except Exception as error:  # noqa: BLE001 - the future hands it to those who wait
            future.fail(error)
        else:
            future.set_result(results)


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
