"""Execution of decided buckets: several at once, without blocking.

They are launched in one order for each process set.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.collectives import COLLECTIVES
from hvd_cluster.engine.collectives.allreduce import reduce_inline
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.launched_work import Launch
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.streams import OwnStreams, on_streams
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport

#: Of a network that is very slow for GPUs.
_MIN_BYTES_PER_S = 50e6

Notify = Callable[["Execution", Stage], None]
#: Called with an executed bucket: its requests, when it was decided and when it was done.
Observe = Callable[[list[Request], float, float], None]
#: Called when the first work of a bucket was launched.
Watch = Callable[[Launch], None]


class Execution:
    """One bucket that is being executed.

    Args:
        requests: those of the bucket.
        transport: moves the tensors.
        buffers: memory for packed tensors.
        recorder: the timeline.
        release: called when the tensors are not in use any more, before the handles are settled.
        observe: called after that.
        watch: called when its first work was launched.
    """

    def __init__(
        self,
        requests: list[Request],
        transport: Transport,
        buffers: BufferPool,
        recorder: Recorder,
        release: Callable[[], None],
        observe: Observe | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._release = release
        self._observe = observe
        self._watch = watch
        self._launch: Launch | None = None
        self._requests = requests
        self._transport = transport
        self._recorder = recorder
        self._names = [name for request in requests for name in request.tensor_names]
        self._stages: Stages = COLLECTIVES[requests[0].signature.kind](requests, transport, buffers, recorder)
        self._stage: Stage | None = None
        self._decided_s = time.monotonic()
        #: The engine's stream of each GPU that takes part.
        self._streams = {gpu: _side_streams[gpu] for gpu in _gpus(requests, transport)}
        #: Other ranks of this host may wait in the middle of this bucket until this rank has finished it.
        self.is_exclusive = transport.is_exclusive
        #: It runs on a GPU, where buckets of all process sets are launched in one order.
        self.is_on_gpu = transport.device.type == "cuda"
        #: All work of this bucket is launched, so the next one of the process set may begin.
        self.is_launched = False
        #: Every handle has its result.
        self.is_done = False

    def is_waiting_for(self, stage: Stage) -> bool:
        """True if :meth:`advance` cannot continue before the work of ``stage`` is done."""
        return self._stage is stage and not self.is_done

    def advance(self, notify: Notify) -> None:
        """Continue until there is work that is not done.

        Args:
            notify: called from any thread with a stage whose work is done.

        Raises:
            RuntimeError: the transport failed.
        """
        if self._stage is None:
            for name in self._names:
                self._recorder.span(name, "QUEUE", self._decided_s, time.monotonic())
        with torch.no_grad(), self._on_stream():
            while not self.is_done:
                if self._stage is not None:
                    self._finish_stage(self._stage)
                try:
                    self._stage = next(self._stages)
                except StopIteration as stop:
                    self._complete(stop.value)
                    return
                self.is_launched = self._stage.is_last and not self.is_exclusive
                if self._watch is not None:
                    self._note_launch(self._watch, self._stage)
                if self._is_waiting(self._stage, notify):
                    return

    def close(self) -> None:
        """Stop: the world has ended."""
        with suppress(RuntimeError):
            self._stages.close()

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail every handle of the bucket, each with its own error."""
        for request in self._requests:
            request.handle.fail(error())

    def _is_waiting(self, stage: Stage, notify: Notify) -> bool:
        # Counts down in the transports' threads; list.pop() is atomic, an attribute's -= is not.
        open_works = list(range(len(stage.works)))
        is_registered = False

        def work_done() -> None:
            open_works.pop()
            if not open_works and is_registered:
                notify(self, stage)

        for work in stage.works:
            work.on_done(work_done)
        is_registered = True
        # Work that was done before the line above has not notified. Work that ends just now may both notify and
        # be seen here: then the notification comes for an earlier stage and is ignored.
        return bool(open_works)

    def _finish_stage(self, stage: Stage) -> None:
        for work in stage.works:
            work.result()
        now_s = time.monotonic()
        for name in self._names:
            self._recorder.span(name, stage.activity, stage.since_s, now_s)

    def _complete(self, results: list[list[torch.Tensor]]) -> None:
        self.is_launched = True
        outcomes = [_outcome(request, tensors) for request, tensors in zip(self._requests, results, strict=True)]
        event = None
        if self._streams:
            first, *others = self._streams.values()
            for other in others:
                first.wait_stream(other)
            event = torch.cuda.Event()
            event.record(first)
        now_s = time.monotonic()
        if self._launch is not None:
            self._launch.finish()
        self._release()
        for request, (value, failure), tensors in zip(self._requests, outcomes, results, strict=True):
            for name, meta in zip(request.tensor_names, request.signature.tensors, strict=False):
                self._recorder.span(
                    name,
                    request.signature.kind.name,
                    self._decided_s,
                    now_s,
                    dtype=meta.dtype,
                    shape=str(list(meta.shape)),
                )
            if failure is not None:
                request.handle.fail(failure)
            else:
                request.handle.succeed(value, tensors, event)
        if self._observe is not None:
            self._observe(self._requests, self._decided_s, now_s)
        self.is_done = True  # last: if something above raises, the remaining handles must fail

    def _note_launch(self, watch: Watch, stage: Stage) -> None:
        if self._launch is not None:
            self._launch.works += stage.works
            return
        events = [request.ready_event for request in self._requests if request.ready_event is not None]
        transfer_s = None
        if self._transport.is_asynchronous:
            tensors = [tensor for request in self._requests for tensor in (*request.inputs, *request.outputs)]
            transfer_s = sum(tensor.nbytes for tensor in tensors) / _MIN_BYTES_PER_S
        self._launch = Launch(list(stage.works), [*events], transfer_s)
        watch(self._launch)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if not self._streams:
            yield
            return
        with on_streams([*self._streams.values()]):
            if self._stage is None:
                for request in self._requests:
                    if request.ready_event is not None:
                        for stream in self._streams.values():
                            stream.wait_event(request.ready_event)
                    for tensor in (*request.inputs, *request.outputs):
                        # The allocator must not hand this memory out again while the side stream uses it.
                        tensor.record_stream(self._streams[tensor.device])
            yield


def execute_inline(
    requests: list[Request],
    transport: Transport,
    buffers: BufferPool,
    recorder: Recorder,
    release: Callable[[], None],
) -> bool:
    """Execute a bucket in this thread, without stages or waits.

    Returns False if the transport cannot do so, or if a GPU has to wait. The arguments are those of :class:`Execution`.
    """
    kind = requests[0].signature.kind
    is_ordered = requests[0].is_ordered
    if not transport.ends_in_caller or not (kind == Kind.ALLREDUCE or is_ordered):
        return False
    if requests[0].ready_event is not None:  # this thread's stream is not behind it
        return False
    start_s = time.monotonic()
    results = reduce_inline(requests, transport) if kind == Kind.ALLREDUCE else None
    if results is None and is_ordered:
        with torch.no_grad():
            results = _drained(COLLECTIVES[kind](requests, transport, buffers, recorder))
    if results is None:
        return False
    if recorder.enabled:
        end_s = time.monotonic()
        phase = "BCAST" if kind == Kind.BROADCAST else kind.name  # as Horovod writes it
        for request in requests:
            for name, meta in zip(request.tensor_names, request.signature.tensors, strict=False):  # a barrier has none
                recorder.span(name, "QUEUE", start_s, start_s)
                recorder.span(name, kind.name, start_s, end_s, dtype=meta.dtype, shape=str(list(meta.shape)))
                recorder.span(name, f"{transport.name}_{phase}", start_s, end_s)
    release()
    for request, tensors in zip(requests, results, strict=True):
        value, failure = _outcome(request, tensors)
        if failure is not None:
            request.handle.fail(failure)
        else:
            request.handle.succeed(value)
    return True


def _drained(stages: Stages) -> list[list[torch.Tensor]]:
    """The results of a collective whose transport ends its work in this thread."""
    while True:
        try:
            next(stages)
        except StopIteration as stop:
            results: list[list[torch.Tensor]] = stop.value
            return results


def _outcome(request: Request, results: list[torch.Tensor]) -> tuple[Any, Exception | None]:
    """The value for an executed request's handle, or the error of its ``finish``.

    ``finish`` may run user code, such as a compressor: its error goes to the caller and does not affect other ranks.
    """
    try:
        return request.finish(results), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller that waits for the handle gets it
        return None, error


class LaunchOrder:
    """Launches buckets one after the other in log order, whatever their process set.

    NCCL's work runs on one stream of the GPU in the order of its launches, and ends when the other ranks have reached
    it. Two ranks that launch the work of two communicators in different orders would wait for each other forever. A
    bucket that first has to learn sizes is launched when they arrive; until then the next bucket waits, even one of
    another process set. This always ends, because the oldest bucket does not depend on later ones.
    """

    def __init__(self) -> None:
        self._pending: deque[Execution] = deque()

    def add(self, bucket: Execution) -> None:
        """A bucket was decided."""
        self._pending.append(bucket)

    def is_turn_of(self, bucket: Execution) -> bool:
        """All earlier buckets are launched."""
        while self._pending and self._pending[0].is_launched:
            self._pending.popleft()
        return not self._pending or self._pending[0] is bucket

    def clear(self) -> None:
        """Nothing will be launched any more."""
        self._pending.clear()


class ExecutionQueue:
    """The decided buckets of one process set, launched in the order of the log.

    Args:
        notify: called from any thread with a bucket and its stage whose work is done.
        gpu_order: the order of the buckets on GPUs, over all process sets.
    """

    def __init__(self, notify: Notify, gpu_order: LaunchOrder) -> None:
        self._notify = notify
        self._gpu_order = gpu_order
        self._waiting: deque[Execution] = deque()
        self._running: list[Execution] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def is_exclusive(self) -> bool:
        """Some bucket is not done in which other ranks of this host may wait."""
        return any(execution.is_exclusive for execution in (*self._running, *self._waiting))

    def append(self, execution: Execution) -> None:
        """A bucket was decided; it starts now if all earlier ones are launched."""
        self._waiting.append(execution)
        if execution.is_on_gpu:
            self._gpu_order.add(execution)
        self.launch()

    def launch(self) -> bool:
        """Start what can start, and drop finished buckets; True if any was started."""
        before = len(self._waiting)
        while self._waiting and all(execution.is_launched for execution in self._running):
            execution = self._waiting[0]
            if execution.is_on_gpu and not self._gpu_order.is_turn_of(execution):
                break
            self._waiting.popleft()
            self._running.append(execution)
            execution.advance(self._notify)
        self._running = [execution for execution in self._running if not execution.is_done]
        return len(self._waiting) < before

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail everything; the transports were aborted."""
        for execution in (*self._running, *self._waiting):
            if not execution.is_done:
                execution.close()
                execution.fail(error)
        self._running.clear()
        self._waiting.clear()


_side_streams = OwnStreams()


def _gpus(requests: list[Request], transport: Transport) -> list[torch.device]:
    """The GPUs of tensors and transport; none if the tensors are on the CPU."""
    gpus = [tensor.device for request in requests for tensor in (*request.inputs, *request.outputs) if tensor.is_cuda]
    if gpus and transport.device.type == "cuda":
        gpus.append(transport.device)
    return list(dict.fromkeys(gpus))
