"""A request to the engine, whose signature ranks must agree on, and its handle."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_cluster.engine.signature import Key, ReduceOp, SetId, Signature, TensorMeta, element_dtype
from hvd_cluster.monitor.step_clock import step_clock

#: Element types that every collective takes.
REDUCED_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


class Handle:
    """The outcome of one request, now or later. Thread-safe.

    Args:
        progress: lets the thread that waits for this handle advance the engine; may return early.
    """

    __slots__ = (
        "_blocked",
        "_callbacks",
        "_error",
        "_event",
        "_is_settled",
        "_progress",
        "_value",
        "_written",
        "decided_s",
        "settled_s",
    )

    def __init__(self, progress: Callable[[Handle], None] | None = None) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        self._progress = progress
        self._written: Sequence[torch.Tensor] = ()
        self._event: torch.cuda.Event | None = None
        self._is_settled = False
        self._callbacks: list[Callable[[], None]] = []
        #: ``time.monotonic()`` when all ranks had submitted the request, or 0.
        self.decided_s = 0.0
        #: ``time.monotonic()`` when the outcome was known, or 0.
        self.settled_s = 0.0
        # A held lock is the cheapest wait that a signal can interrupt.
        self._blocked = threading.Lock()
        self._blocked.acquire()

    def succeed(self, value: Any, written: Sequence[torch.Tensor] = (), event: torch.cuda.Event | None = None) -> None:
        """The request was executed; called once.

        Args:
            value: what :meth:`wait` returns.
            written: the tensors that hold the results, even if ``value`` does not contain them.
            event: the CUDA event after which they do, if a GPU still works on them.
        """
        self._value = value
        if event is not None:
            self._written, self._event = written, event
        self._settle()

    def fail(self, error: Exception) -> None:
        """The request failed; does nothing if its outcome is known already."""
        if self._is_settled:
            return
        self._error = error
        self._settle()

    def _settle(self) -> None:
        self.settled_s = time.monotonic()
        self._progress = None  # a kept handle or error must not keep the engine
        self._is_settled = True
        self._blocked.release()
        self._call_back()

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the outcome is known.

        The callback runs in the progress thread, or at once if the outcome is known already. It must neither wait nor
        raise.
        """
        self._callbacks.append(callback)
        if self._is_settled:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            with suppress(IndexError):  # another thread has taken it
                self._callbacks.pop()()

    def settled(self) -> bool:
        """True once the outcome is known, even if a GPU still works on it."""
        return self._is_settled

    @property
    def done(self) -> bool:
        """True once the outcome is known; never blocks."""
        return self._is_settled and (self._event is None or bool(self._event.query()))

    @property
    def error(self) -> Exception | None:
        """The error of a failed request."""
        return self._error

    def settles_within(self, timeout_s: float) -> bool:
        """Whether the outcome is known after at most ``timeout_s`` seconds.

        Other threads advance the engine.
        """
        if self._is_settled:
            return True
        if not self._blocked.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            return False
        self._blocked.release()
        return True

    def wait(self) -> Any:
        """Block until the request's value is known; return it, or raise its error.

        From then on the caller's stream may read results on a GPU: the stream waits for them, not the caller.
        """
        if not self._is_settled:
            begun_s = time.monotonic()
            progress = self._progress
            if progress is not None:
                progress(self)
            with self._blocked:
                pass
            step_clock.note_wait(begun_s, self.decided_s)
        if self._error is not None:
            # A fresh traceback each time, and no growing chain when several callers wait on one handle.
            raise self._error.with_traceback(None)
        if self._event is not None:
            _hand_over(self._written, self._event)
        return self._value


@dataclass
class Request:
    """One collective that this rank has submitted."""

    name: str
    process_set_id: SetId
    signature: Signature
    #: The tensors to send, as submitted; contiguous.
    inputs: list[torch.Tensor]
    #: Where results go: the inputs for an in-place operation, empty if the engine allocates.
    outputs: list[torch.Tensor]
    #: Makes the value of the handle from the list of results.
    finish: Callable[[list[torch.Tensor]], Any]
    handle: Handle
    #: Rows of the tensor for each rank of the process set, or elements if there are outputs; alltoall only.
    splits: tuple[int, ...] = ()
    #: ``time.monotonic()`` of the submission.
    submitted_s: float = field(default_factory=time.monotonic)
    #: The epoch in which this rank has voted for it, or -1; see :mod:`hvd_cluster.engine.shared_memory.ballot`.
    epoch: int = -1
    #: The CUDA event after which the inputs hold what was submitted.
    ready_event: torch.cuda.Event | None = None
    #: The timeline's names of the tensors, if not the request's name.
    labels: Sequence[str] = ()
    #: The user has not named it: a number is appended to ``name`` when it is submitted.
    is_unnamed: bool = False
    #: If an earlier request of this name is not done, this one waits for it instead of being refused. It is submitted
    #: at once, not held back to be fused with others.
    is_ordered: bool = False
    #: Elements of the output from each rank of the process set; alltoall with outputs only.
    output_splits: tuple[int, ...] = ()
    #: For how long this rank waits for other ranks to submit it too: then the world ends.
    timeout_s: float = math.inf
    #: ``time.monotonic()`` when the earlier request of its name was done for which it was held; the timeout counts from
    #: then on, because all ranks hold it.
    released_s: float = 0.0
    #: Returns the ``time.monotonic()`` since when a caller waits for it, or infinity; None if one always does.
    awaited_since: Callable[[], float] | None = None

    @property
    def since_s(self) -> float:
        """Since when this rank waits for it; infinite while no caller does."""
        return self.submitted_s if self.awaited_since is None else max(self.submitted_s, self.awaited_since())

    @property
    def expires_s(self) -> float:
        """``time.monotonic()`` when its timeout is over; infinite while no caller waits."""
        return max(self.since_s, self.released_s) + self.timeout_s

    @property
    def key(self) -> Key:
        """Matches this request with those of other ranks."""
        return (self.process_set_id, self.name)

    @property
    def tensor_names(self) -> list[str]:
        """A name per tensor: its label, the request's, or ``<name>_<i>of<n>`` in groups."""
        if self.labels:
            return list(self.labels)
        count = len(self.signature.tensors)
        return [self.name] if count <= 1 else [f"{self.name}_{i}of{count}" for i in range(1, count + 1)]


# Dynamo does not trace code of our files (see compiled_steps.py); the __init__ that dataclass() generates has no file.
Request.__init__.__code__ = Request.__init__.__code__.replace(co_filename=__file__)


def _hand_over(tensors: Sequence[torch.Tensor], event: torch.cuda.Event) -> None:
    """Let the caller's stream wait for the engine's results and keep their memory."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(stream)


def recorded_event(tensors: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
    """The event after which this thread's stream has computed ``tensors``.

    All are on one device; the event is None for a CPU.
    """
    if not tensors or not tensors[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))
    return event


def describe(tensor: torch.Tensor, *, any_first_dimension: bool = False) -> TensorMeta:
    """The meta data of ``tensor``, first dimension -1 if ranks may differ in it."""
    shape = tuple(tensor.shape)
    return TensorMeta(
        _NAMES.get(tensor.dtype) or dtype_name(tensor.dtype),
        (-1, *shape[1:]) if any_first_dimension else shape,
        "cpu" if tensor.is_cpu else tensor.device.type,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of an element type, e.g. "float32"."""
    name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


_NAMES: dict[torch.dtype, str] = {}


def neutral_for(key: Key, signature: Signature, gpu: int) -> Request:
    """A joined rank's part in what it has not submitted, which changes no result."""
    tensors = [
        torch.full(
            meta.shape,
            _neutral(signature.op, element_dtype(meta.dtype), signature.prescale),
            dtype=element_dtype(meta.dtype),
            device=torch.device(meta.device, gpu) if meta.device == "cuda" and gpu >= 0 else torch.device(meta.device),
        )
        for meta in signature.tensors
    ]
    return Request(
        name=key[1],
        process_set_id=key[0],
        signature=signature,
        inputs=tensors,
        outputs=tensors,
        finish=lambda _: None,
        handle=Handle(),
        # This thread's stream writes the tensors, after its earlier work.
        ready_event=recorded_event(tensors),
    )


def _neutral(op: ReduceOp, dtype: torch.dtype, prescale: float) -> float:
    """The neutral element of ``op`` after ``prescale``: 0, 1, infinity or a limit."""
    if op == ReduceOp.PRODUCT:
        return 1 / prescale if prescale else 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    is_upper = (op == ReduceOp.MIN) == (prescale >= 0)
    if dtype == torch.bool:
        return is_upper
    if dtype.is_floating_point:
        return 0 if prescale == 0 else math.inf if is_upper else -math.inf
    limits = torch.iinfo(dtype)
    limit = limits.max if is_upper else limits.min
    if 0 <= prescale <= 1:
        return limit
    # The product, which is computed in float64, must be a number of this type too.
    bound = limits.max - (4096 if dtype == torch.int64 else 0)
    return int(min(max(limit, -bound), bound) / max(abs(prescale), 1))
