"""Accepts connections from peers that know the job's secret."""

from __future__ import annotations

import contextlib
import logging
import pickle
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.sockets import ANY, DEAD_HOST_S, detect_dead_host, listen

logger = logging.getLogger(__name__)

#: Seconds until the next attempt when a connection could not be accepted: file descriptors may be free again by then.
_RETRY_S = 0.2
#: Seconds that a peer gets to authenticate, and then to send its handshake.
_HANDSHAKE_TIMEOUT_S = 10.0
#: Connections that may be in their handshake at the same time; many agents connect at once.
_MAX_HANDSHAKES = 256


class Listener:
    """Accepts connections until it is closed.

    An error on one of them does not affect the others.

    Args:
        secret: the job's secret. A peer that does not prove that it knows the secret is disconnected.
        serve: called with the channel of each authenticated peer, in the connection's own thread. It must close the
            channel or keep it.
        hosts: the addresses to listen on, all on one port.
        timeout_s: seconds that a peer gets to authenticate.
        max_connections: connections that may be authenticating or in ``serve`` at the same time. A further connection
            closes the oldest one, so that a flood of connections does not lock out the job's own.
        name: prefix of the threads' names.
        prepare: called with each socket before anything is read from it.
        refusal_level: the log level for refused connections.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(
        self,
        secret: bytes,
        serve: Callable[[Channel], None],
        hosts: Sequence[str] = (ANY,),
        *,
        timeout_s: float,
        max_connections: int,
        name: str,
        prepare: Callable[[socket.socket], None] = lambda _socket: None,
        refusal_level: int = logging.INFO,
    ) -> None:
        self._secret = secret
        self._serve = serve
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._name = name
        self._prepare = prepare
        self._refusal_level = refusal_level
        self._sockets = listen(hosts)
        self.port: int = self._sockets[0].getsockname()[1]
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}  # oldest first
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        # Created here, so that it has its descriptor before any connection.
        self._selector = selectors.DefaultSelector()
        for listening in self._sockets:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ)
        self._accepting = threading.Thread(target=self._accept, name=name, daemon=True)
        self._accepting.start()

    def close(self, wait_s: float | None = None) -> None:
        """Stop accepting connections. May be called twice.

        Args:
            wait_s: seconds to wait for each connection that is being served; ``timeout_s`` by default.
        """
        self._closing.set()
        for listening in self._sockets:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the selector
        self._accepting.join()
        for listening in self._sockets:
            listening.close()
        for thread in self._threads:
            thread.join(self._timeout_s if wait_s is None else wait_s)

    def _accept(self) -> None:
        with self._selector as selector:
            has_warned = False
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._closing.is_set():
                    return
                for listening in self._sockets:
                    if listening not in ready:
                        continue
                    try:
                        sock, _ = listening.accept()
                    except BlockingIOError:  # the peer has closed the connection
                        continue
                    except OSError as error:  # for example, no file descriptor is left
                        if not has_warned:
                            logger.warning("a connection could not be accepted, trying again: %s", error)
                        has_warned = True
                        self._closing.wait(_RETRY_S)
                        continue
                    has_warned = False
                    self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._connections) >= self._max_connections:
                with contextlib.suppress(OSError):
                    next(iter(self._connections)).shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
            self._connections[sock] = None
        thread = threading.Thread(target=self._run, args=(sock,), name=f"{self._name}-call", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            logger.warning("a connection could not be served: %s", error)
            sock.close()
            self._forget(sock)
            return
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def _run(self, sock: socket.socket) -> None:
        try:
            self._prepare(sock)
            channel = Channel.accept(sock, self._secret, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - of any kind: the peer may send anything
            logger.log(self._refusal_level, "refused a connection that does not belong to the job: %s", error)
            sock.close()
        else:
            self._serve(channel)
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            del self._connections[sock]


def listen_for_handshakes(
    secret: bytes,
    accept: Callable[[Any, Channel], bool],
    hosts: Sequence[str] = (ANY,),
    unread_s: float = DEAD_HOST_S,
) -> Listener:
    """A :class:`Listener` for peers whose first message says who they are.

    Args:
        accept: called, from another thread, with the first message of a peer (any object) and its channel. If it
            returns False the channel is closed.
        unread_s: see :func:`hvd_cluster.rendezvous.sockets.detect_dead_host`.
    """

    def serve(channel: Channel) -> None:
        try:
            channel.settimeout(_HANDSHAKE_TIMEOUT_S)
            handshake = pickle.loads(channel.recv())
            channel.settimeout(None)
        except (OSError, EOFError) as error:
            logger.info("a peer disconnected before its handshake: %s", error)
            channel.close()
        except Exception:  # unpickling may raise anything
            logger.exception("the handshake of a peer cannot be unpickled; it may run another version of hvd_cluster")
            channel.close()
        else:
            if not accept(handshake, channel):
                channel.close()

    return Listener(
        secret,
        serve,
        hosts,
        timeout_s=_HANDSHAKE_TIMEOUT_S,
        max_connections=_MAX_HANDSHAKES,
        name="hvd-agents",
        prepare=lambda sock: detect_dead_host(sock, unread_s),
    )
