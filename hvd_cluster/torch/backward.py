"""The calling thread's backward pass, with hooks for each gradient and its end."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch.amp import GradScaler
from torch.utils.checkpoint import CheckpointFunction

#: Packages whose code reads gradients from an optimizer's parameter groups, to clip them or to find overflows.
_READERS = ("torch.amp", "torch.cuda.amp", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "apex")

#: torch does not nest passes more deeply; older entries belong to passes that ended with an exception.
_MAX_OPEN_PASSES = 64

#: By the id of a running pass: the callbacks at its end, by their order.
_at_end: dict[int, dict[int, Callable[[bool], Iterator[None]]]] = {}
#: The hooks that report gradients.
_attached: weakref.WeakSet[GradientHooks] = weakref.WeakSet()
_lock = threading.Lock()
_numbers = itertools.count()


def is_running() -> bool:
    """Whether a backward pass runs in this thread."""
    return current_pass() != -1


def current_pass() -> int:
    """The id of the backward pass that runs in this thread, or -1.

    A re-entrant checkpoint's pass has its own.
    """
    return int(torch._C._current_graph_task_id())


def call_at_end(pass_id: int, order: int, callback: Callable[[bool], Iterator[None]]) -> None:
    """Run ``callback`` after this thread's backward pass has its last gradient.

    Args:
        pass_id: :func:`current_pass`.
        order: callbacks of one pass run in this order; a second one of the same number is ignored.
        callback: gets True if the pass was that of a re-entrant checkpoint, so that an outer pass continues. The
            callbacks of one pass take turns: each runs to its next ``yield``.
    """
    with _lock:
        callbacks = _at_end.get(pass_id)
        is_first = callbacks is None
        if callbacks is None:
            while len(_at_end) >= _MAX_OPEN_PASSES:
                del _at_end[min(_at_end)]
            callbacks = _at_end[pass_id] = {}
        callbacks.setdefault(order, callback)
    if is_first:
        # autograd's engine is untyped.
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end, pass_id))


def _end(pass_id: int) -> None:
    with _lock:
        callbacks = _at_end.pop(pass_id, {})
    is_nested = in_checkpoint()
    running = [callback(is_nested) for _, callback in sorted(callbacks.items())]
    while running:
        running = [each for each in running if next(each, running) is None]


def in_checkpoint() -> bool:
    """Whether a re-entrant checkpoint runs this backward pass within another one."""
    inner = CheckpointFunction.backward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not inner:
        frame = frame.f_back
    return frame is not None


def reads_gradients(frame: FrameType) -> bool:
    """Whether a frame reads gradients through parameter groups, not a rate to log."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(_READERS) or isinstance(frame.f_locals.get("self"), GradScaler)


class GradientReceiver(Protocol):
    """The object that the hooks call."""

    def enter_world(self) -> None:
        """Prepare for a pass's first gradient; the world may be new since the last one."""

    def add_gradient(self, number: int, parameter: torch.Tensor) -> None:
        """The backward pass has accumulated the gradient of a parameter."""

    def end_pass(self, *, is_nested: bool) -> Iterator[None]:
        """Handle a pass's last gradient; yield where other optimizers come first."""


class GradientHooks:
    """The hooks of one optimizer.

    Args:
        receiver: referenced weakly, so that a deleted optimizer does not keep sending gradients.
    """

    def __init__(self, receiver: GradientReceiver) -> None:
        self._receiver = weakref.ref(receiver)
        #: Unique among the optimizers of this process.
        self.number = next(_numbers)
        #: The thread that has made the optimizer.
        self.maker = threading.current_thread()
        #: True once :meth:`attach` was called.
        self.is_attached = False
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._ids: set[int] = set()
        #: Living hooks of other optimizers that have some of these parameters too.
        self._rivals: weakref.WeakSet[GradientHooks] = weakref.WeakSet()
        # A model on several GPUs has a backward thread for each.
        self._lock = threading.RLock()
        #: The backward pass whose end will be reported.
        self._pass_id = -1
        #: By the number of a parameter, the stream that has computed its latest gradient; none on the CPU.
        self.streams: dict[int, torch.cuda.Stream] = {}
        #: Gradients that hooks of the user may still change: see :func:`_on_gradient`.
        self._deferred: list[tuple[int, torch.Tensor]] = []

    def attach(self, parameters: Sequence[torch.Tensor]) -> None:
        """Hook into the backward pass, for parameters that are still frozen too."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.streams.clear()
        self.is_attached = True
        self._ids = set(map(id, parameters))
        self._rivals.update(hooks for hooks in _attached if hooks is not self and hooks._ids & self._ids)
        _attached.add(self)
        this = weakref.ref(self)
        for number, parameter in enumerate(parameters):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # it cannot have a gradient
            was_frozen = not parameter.requires_grad
            parameter.requires_grad_(True)
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, number)))
            parameter.requires_grad_(not was_frozen)

    def is_contested(self, parameter: torch.Tensor) -> bool:
        """Whether another optimizer's hooks report the gradient of ``parameter`` too."""
        return bool(self._rivals) and any(id(parameter) in rival._ids for rival in self._rivals)

    def await_end_of_pass(self) -> None:
        """Report the beginning of this backward pass to the receiver, later its end."""
        pass_id = current_pass()
        if pass_id != self._pass_id:
            self._pass_id = pass_id
            call_at_end(pass_id, self.number, partial(_at_end_of_pass, weakref.ref(self)))
            if (receiver := self._receiver()) is not None:
                receiver.enter_world()

    def on_gradient(self, number: int, parameter: torch.Tensor, *, is_last_hook: bool) -> None:
        """Report a gradient; if hooks of the user follow, when the next one comes."""
        with self._lock:
            self.report_deferred()
            receiver = self._receiver()
            if receiver is None:
                return
            if parameter.is_cuda:
                self.streams[number] = torch.cuda.current_stream(parameter.device)
            if is_last_hook:
                receiver.add_gradient(number, parameter)
            else:
                self.await_end_of_pass()
                self._deferred.append((number, parameter))

    def on_end(self, *, is_nested: bool) -> Iterator[None]:
        """Report the end of a backward pass."""
        self._pass_id = -1
        with self._lock:
            self.report_deferred()
        receiver = self._receiver()
        return iter(()) if receiver is None else receiver.end_pass(is_nested=is_nested)

    def report_deferred(self) -> None:
        """Report gradients now whose hooks may still run: a step is taken inside one."""
        if self._deferred and (receiver := self._receiver()) is not None:
            deferred, self._deferred = self._deferred, []
            for number, parameter in deferred:
                receiver.add_gradient(number, parameter)


def _on_gradient(hooks: Callable[[], GradientHooks | None], number: int, parameter: torch.Tensor) -> None:
    """The hook of a parameter.

    The gradient is reduced as the user's own hooks leave it, also those that were registered later and run after this
    one.
    """
    this = hooks()
    if this is not None:
        last = next(reversed(parameter._post_accumulate_grad_hooks.values()))
        this.on_gradient(number, parameter, is_last_hook=getattr(last, "func", None) is _on_gradient)


def _remove(handles: list[Any]) -> None:
    """Remove the hooks of a deleted optimizer, whose parameters may live on."""
    for handle in handles:
        handle.remove()


def _at_end_of_pass(hooks: Callable[[], GradientHooks | None], is_nested: bool) -> Iterator[None]:
    this = hooks()
    return iter(()) if this is None else this.on_end(is_nested=is_nested)
