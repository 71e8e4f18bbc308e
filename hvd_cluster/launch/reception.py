"""Answers everybody who connects to a listening socket, or to one of several, each in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

#: Seconds until the next try where a connection could not be accepted: descriptors may be free again by then.
_TRY_AGAIN_S = 0.2


class Reception:
    """Accepts connections until it is closed, whatever becomes of single ones.

    Args:
        listeners: where they come; closed by :meth:`close`.
        answer: called with each connection in a thread of its own; has to close it or to hand it on.
        most: connections that may be in the course of being answered; the oldest gives way to one more, so that no
            crowd keeps others out.
        name: of the threads.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        answer: Callable[[socket.socket], None],
        most: int,
        name: str,
    ) -> None:
        self._listeners = listeners
        self._answer = answer
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._callers: dict[socket.socket, None] = {}  # oldest first
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._selector = selectors.DefaultSelector()  # here, so that its descriptor is there before any call can be
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._accepting = threading.Thread(target=self._accept, name=name, daemon=True)
        self._accepting.start()

    def close(self, timeout_s: float) -> None:
        """Answer nobody any more; wait up to ``timeout_s`` seconds for each of those that are being answered."""
        self._closing.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the selector
        self._accepting.join()
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(timeout_s)

    def _accept(self) -> None:
        with self._selector as selector:
            is_told = False
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._closing.is_set():
                    return
                for listener in self._listeners:
                    if listener not in ready:
                        continue
                    try:
                        sock, _ = listener.accept()
                    except BlockingIOError:  # that caller has gone
                        continue
                    except OSError as error:  # no descriptor is left, say: the next may be heard
                        if not is_told:
                            logger.warning("a connection could not be accepted, trying again: %s", error)
                        is_told = True
                        self._closing.wait(_TRY_AGAIN_S)
                        continue
                    is_told = False
                    self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._callers) >= self._most:
                with contextlib.suppress(OSError):
                    next(iter(self._callers)).shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
            self._callers[sock] = None
        thread = threading.Thread(target=self._run, args=(sock,), name=f"{self._name}-call", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # as many threads as the system allows
            logger.warning("a connection could not be answered: %s", error)
            sock.close()
            self._forget(sock)
            return
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def _run(self, sock: socket.socket) -> None:
        try:
            self._answer(sock)
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            del self._callers[sock]
