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
        admit: called with each connection, one after the other, before its thread starts; may wait.
        answer: called with it in its thread; has to close it or to hand it on.
        leave: called with it when it was answered, or could not be.
        name: of the threads.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        admit: Callable[[socket.socket], object],
        answer: Callable[[socket.socket], None],
        leave: Callable[[socket.socket], object],
        name: str,
    ) -> None:
        self._listeners = listeners
        self._admit, self._answer, self._leave = admit, answer, leave
        self._name = name
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
        self._admit(sock)
        thread = threading.Thread(target=self._run, args=(sock,), name=f"{self._name}-call", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # as many threads as the system allows
            logger.warning("a connection could not be answered: %s", error)
            sock.close()
            self._leave(sock)
            return
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def _run(self, sock: socket.socket) -> None:
        try:
            self._answer(sock)
        finally:
            self._leave(sock)
