"""A door at which those call who know the job's secret: agents of the launcher; the driver, of an actor on Ray."""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.machine import notice_vanishing
from hvd_cluster.rendezvous.channel import Channel

logger = logging.getLogger(__name__)

_CALL_BACK_TIMEOUT_S = 10.0
#: Connections that may prove themselves at the same time; a burst of agents does so at once.
_MOST_STRANGERS = 256


class Door:
    """Lets in those who prove that they know the secret, and say who they are.

    Args:
        secret: the job's secret.
        let_in: called, from another thread, with what a caller says (any object) and its connection; False closes it
            again.
        host: the address to listen on.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, secret: bytes, let_in: Callable[[Any, Channel], bool], host: str = "0.0.0.0") -> None:
        self._secret = secret
        self._let_in = let_in
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        #: Where it listens.
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, args=(self._listener,), name="hvd-agents", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        for thread in self._threads:
            thread.join(_CALL_BACK_TIMEOUT_S)

    def _accept(self, listener: socket.socket) -> None:
        """Strangers get a thread each until they have failed to prove themselves."""
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                self._count(sock)
                thread = threading.Thread(target=self._welcome, args=(sock,), name="hvd-agent", daemon=True)
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
                thread.start()

    def _count(self, stranger: socket.socket) -> None:
        """One more has to prove itself: the oldest of too many gives way, so that no crowd keeps the door shut."""
        with self._lock:
            if len(self._strangers) >= _MOST_STRANGERS:
                with contextlib.suppress(OSError):
                    next(iter(self._strangers)).shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
            self._strangers[stranger] = None

    def _welcome(self, sock: socket.socket) -> None:
        try:
            notice_vanishing(sock)
            channel = Channel.accept(sock, self._secret, _CALL_BACK_TIMEOUT_S)
            channel.settimeout(_CALL_BACK_TIMEOUT_S)
            hello = pickle.loads(channel.recv())
            channel.settimeout(None)
        except (OSError, EOFError, AuthenticationError) as error:
            logger.info("a connection that does not belong to the job was dropped: %s", error)
            sock.close()
        else:
            if not self._let_in(hello, channel):
                channel.close()
        finally:
            with self._lock:
                del self._strangers[sock]
