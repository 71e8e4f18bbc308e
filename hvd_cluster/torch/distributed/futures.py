"""Futures whose continuations may make calls of their own.

torch matches the calls of a group by their order. A call made by a continuation has no place in that order: on one rank
the continuation runs in the thread that completes the future, while the training thread makes further calls; on another
rank it runs at once, because the future is complete already. DDP with PowerSGD and several buckets is such a program.
So :meth:`CallFuture.then` remembers which call a continuation follows, and what it calls is matched by that: "the first
allreduce in the continuation `decompress` of the fifth allreduce".
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CodeType, TracebackType
from typing import Any, NoReturn

import torch

from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.signature import SetId
from hvd_cluster.engine.streams import on_streams
from hvd_cluster.monitor.step_clock import step_clock

#: Longer names are cut: a continuation that adds itself to the call that it makes would have ever longer ones.
_MAX_TEXT = 300


@dataclass(frozen=True)
class CallName:
    """What all ranks of a group call one call of it, or a continuation of one."""

    text: str
    #: The group.
    label: str
    set_id: SetId

    def above(self, set_id: SetId) -> str:
        """The text as part of the name of a call in another group, or in the same one.

        The group is named if all ranks of the other one are in it. Else some of them are in its siblings, as if each
        host has a group and a continuation calls the group of all ranks.
        """
        is_inside = self.set_id == 0 or (set_id != 0 and set(_ranks(set_id)) <= set(_ranks(self.set_id)))
        return f"{self.label}: {self.text}" if is_inside else self.text

    def followed_by(self, continuation: str) -> CallName:
        text = f"{continuation} of {self.text}"
        if len(text) > _MAX_TEXT:
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            text = f"{text[: _MAX_TEXT // 2]}... {digest}"
        return replace(self, text=text)


class Continuation:
    """The run of one continuation; numbers the calls that it makes."""

    def __init__(self, name: CallName) -> None:
        self.name = name
        self._made: Counter[str] = Counter()

    def next_number(self, call: str) -> int:
        """How many calls like ``call`` it has made before."""
        self._made[call] += 1
        return self._made[call] - 1


_running: ContextVar[Continuation | None] = ContextVar("hvd_continuation", default=None)


def running_continuation() -> Continuation | None:
    """The continuation that this thread runs now."""
    return _running.get()


class CallFuture(torch.futures.Future[Any]):
    """Completed by :meth:`set_result` or :meth:`fail`.

    Args:
        name: of the call it belongs to, equal on all ranks; None for messages between two ranks.
        devices: the GPUs on which the result is.
        handle: that of the call, for the step clock; None if there are several.
    """

    def __init__(self, name: CallName | None, devices: list[Any], handle: Handle | None = None) -> None:
        super().__init__(devices=devices or None)
        self._name = name
        self._devices = devices
        self._handle = handle
        self._continuations: Counter[str] | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def wait(self) -> Any:
        """The result, when it is there.

        Raises:
            Exception: what the call, or the continuation, has raised.
        """
        begun_s = time.monotonic()
        try:
            return self._checked(super().wait)
        finally:
            step_clock.note_wait(begun_s, begun_s if self._handle is None else self._handle.decided_s)

    def value(self) -> Any:
        """The result, which must be there.

        Raises:
            Exception: what the call, or the continuation, has raised.
        """
        return self._checked(super().value)

    def then(self, callback: Callable[[Any], Any]) -> CallFuture:
        """A future with what ``callback(self)`` returns when this one is complete."""
        name = self._next_name(callback)
        following = CallFuture(name, self._devices, self._handle)

        def run(_: object) -> None:
            try:
                with _continuing(name):
                    result = callback(self)
            except BaseException as error:  # noqa: BLE001 - the future hands it to those who wait
                text = f"an error of a continuation: {''.join(traceback.format_exception(error))}"
                # Without this frame, which holds the future that will hold the error.
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                _in_turn(functools.partial(following.fail, error, text))
            else:
                _in_turn(_on_these_streams(self._devices, functools.partial(following.set_result, result)))

        super().add_done_callback(run)
        return following

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(self)`` when this future is complete."""
        name = self._next_name(callback)

        def run(_: object) -> None:
            with _continuing(name):
                callback(self)

        super().add_done_callback(run)

    def set_exception(self, result: Any) -> None:
        """Complete this future by an exception."""
        assert isinstance(result, Exception), f"{result} is of type {type(result)}, not an Exception."
        self.fail(result)

    def fail(self, error: BaseException, text: str = "") -> None:
        """Complete this future by an error.

        Args:
            error: for those who wait in Python.
            text: for those who wait in C++; by default the type and the text of the error.
        """
        self._error, self._traceback = error, error.__traceback__
        # C++ would keep the error's frames, with all that they hold: the garbage collector does not see into it.
        own, text = weakref.ref(self), text or f"{type(error).__name__}: {error}"

        def raise_error(_: object) -> None:
            future = own()
            if future is None:
                raise RuntimeError(text)
            future._raise_error()

        self._set_unwrap_func(raise_error)
        self.set_result(_Failure(text))

    def _checked(self, get: Callable[[], Any]) -> Any:
        """What ``get`` returns, or the error of this future."""
        try:
            return get()
        except Exception:  # on a GPU, C++ raises an error of another type than the one kept here, which is raised below
            if self._error is None:
                raise
        return self._raise_error()

    def _raise_error(self) -> NoReturn:
        error = self._error
        assert error is not None
        try:
            raise error.with_traceback(self._traceback)
        finally:
            del error  # it holds this frame

    def _next_name(self, callback: Callable[[Any], Any]) -> CallName | None:
        """The name of a continuation, unchanged by others, which only some ranks may add."""
        if self._name is None:
            return None
        if self._continuations is None:
            self._continuations = Counter()
        function = _described(callback)
        number = self._continuations[function]
        self._continuations[function] += 1
        return self._name.followed_by(f"{function} #{number}" if number else function)


class _Failure:
    """A failed future's value for torch's C++, to which Python cannot hand an error.

    C++ expects tensors. It pickles the value in order to find them, and passes on what that raises; or it says that it
    cannot cast the value, which it shows.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(self._text)

    def __repr__(self) -> str:
        return self._text


class _Turns(threading.local):
    """What a thread does after the continuation that it runs now; None outside one."""

    waiting: deque[Callable[[], None]] | None = None
    #: It runs a continuation, named or not.
    is_continuing: bool = False


_turns = _Turns()


def is_in_continuation() -> bool:
    """Whether this thread runs a continuation, also one of a message."""
    return _turns.is_continuing


def _in_turn(complete: Callable[[], None]) -> None:
    """Complete futures one by one: long chains would exceed the recursion limit."""
    if _turns.waiting is not None:
        _turns.waiting.append(complete)
        return
    _turns.waiting = deque([complete])
    try:
        while _turns.waiting:
            _turns.waiting.popleft()()
    finally:
        _turns.waiting = None


def _on_these_streams(gpus: list[Any], complete: Callable[[], None]) -> Callable[[], None]:
    """``complete``, to be called later as if now.

    A future is complete where the GPUs' current streams have got to.
    """
    streams = [torch.cuda.current_stream(gpu) for gpu in gpus]

    def call() -> None:
        with on_streams(streams):
            complete()

    return call


@contextmanager
def _continuing(name: CallName | None) -> Iterator[None]:
    token = _running.set(None if name is None else Continuation(name))
    # What the continuation completes itself, it may wait for.
    before, _turns.waiting = _turns.waiting, None
    was_continuing, _turns.is_continuing = _turns.is_continuing, True
    try:
        yield
    finally:
        _turns.waiting, _turns.is_continuing = before, was_continuing
        _running.reset(token)


def _described(callback: Callable[[Any], Any]) -> str:
    """A function's name and line."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    name, code = getattr(callback, "__name__", None), getattr(callback, "__code__", None)
    if not isinstance(name, str):
        name = type(callback).__name__
    return f"{name}:{code.co_firstlineno}" if isinstance(code, CodeType) else name


def _ranks(set_id: SetId) -> tuple[int, ...]:
    return set_id if isinstance(set_id, tuple) else ()
