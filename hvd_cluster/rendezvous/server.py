"""The job's key-value store: one thread that serves every worker of the job."""

from __future__ import annotations

import collections
import contextlib
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.link import Link
from hvd_cluster.rendezvous.protocol import pack, unpack
from hvd_cluster.rendezvous.sockets import ANY, Closing, keep_alive, listen
from hvd_cluster.rendezvous.table import KeyValueTable
from hvd_cluster.topology import Topology

logger = logging.getLogger(__name__)

#: Unauthenticated connections; above this number the oldest are closed. 512 workers may connect at the same time.
_MAX_UNAUTHENTICATED = 600


class KeyValueServer(Closing):
    """Serves a :class:`KeyValueTable` to clients that know the job's secret.

    A context manager. It runs from its construction until :meth:`close`.

    Args:
        host: the address to listen on, or several; :meth:`port_at` adds more.
        port: the port to listen on; 0 takes a free one, see :attr:`port`.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, secret: bytes, host: str | Sequence[str] = "127.0.0.1", port: int = 0) -> None:
        self._secret = secret
        hosts = [host] if isinstance(host, str) else host
        listeners = listen(hosts, port)
        #: The port on which the server listens.
        self.port: int = listeners[0].getsockname()[1]
        self._ports = dict.fromkeys([*hosts, *(one.getsockname()[0] for one in listeners)], self.port)
        self._to_listen: collections.deque[socket.socket] = collections.deque(listeners)
        self._listeners: set[socket.socket] = set()
        self._wakeup, self._wakeup_reader = socket.socketpair()
        self._closing = threading.Lock()  # no wakeup is sent and no port opened after the thread has ended
        self._to_close: collections.deque[bytes] = collections.deque()
        self._table: KeyValueTable[Link] = KeyValueTable()
        self._links: dict[Link, None] = {}  # oldest first
        self._thread = threading.Thread(target=self._serve, name="hvd-rendezvous", daemon=True)
        self._thread.start()

    def port_at(self, host: str) -> int:
        """The port at an address of this host, where the server begins to listen.

        Raises:
            OSError: no port can be opened there.
        """
        with self._closing:
            port = self._ports.get(host) or self._ports.get(ANY)
            if port is None:
                if not self._thread.is_alive():
                    raise ConnectionError("the rendezvous is closed")
                listeners = listen([host])
                port = int(listeners[0].getsockname()[1])
                self._ports |= dict.fromkeys([host, *(one.getsockname()[0] for one in listeners)], port)
                self._to_listen.extend(listeners)
                self._wakeup.send(b"l")
        return port

    def close_keys(self, prefix: str) -> None:
        """Remove the keys with a prefix and refuse them from now on.

        The world that they belong to has ended.
        """
        self._to_close.append(prefix.encode())
        with self._closing:
            if self._thread.is_alive():
                self._wakeup.send(b"c")

    def close(self) -> None:
        """Stop serving and close all connections.

        May be called twice, and by several threads.
        """
        with self._closing:
            if self._thread.is_alive():
                self._wakeup.send(b"x")
                self._thread.join()
            self._wakeup.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup_reader, selectors.EVENT_READ)
            while True:
                while self._to_listen:
                    listener = self._to_listen.popleft()
                    listener.setblocking(False)
                    selector.register(listener, selectors.EVENT_READ)
                    self._listeners.add(listener)
                deadline_s = self._table.next_deadline_s
                timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                ready = [key.fileobj for key, _ in selector.select(timeout_s)]
                if self._wakeup_reader in ready:
                    if b"x" in self._wakeup_reader.recv(4096):
                        break
                    while self._to_close:
                        self._deliver(self._table.close(self._to_close.popleft()))
                for source in ready:
                    if isinstance(source, socket.socket) and source in self._listeners:
                        self._accept(source, selector)
                    elif isinstance(source, Link) and source in self._links:  # otherwise it was dropped in this turn
                        self._read(selector, source)
                self._deliver(self._table.expire(time.monotonic()))
                for link in self._links:
                    selector.modify(link, link.events)
            for link in self._links:
                link.close()
            for listener in [*self._listeners, *self._to_listen]:
                listener.close()
            self._wakeup_reader.close()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            # The caller is gone, or no file descriptor is left: close unauthenticated connections first.
            logger.debug("the rendezvous could not accept a connection: %s", error)
            self._drop_unauthenticated(selector, most=0)
            return
        with contextlib.suppress(OSError):  # the next read reports the end
            keep_alive(sock)
            link = Link(sock, self._secret, accepts=True)
            link.flush()
            self._links[link] = None
            selector.register(link, link.events)
        self._drop_unauthenticated(selector, most=_MAX_UNAUTHENTICATED)

    def _drop_unauthenticated(self, selector: selectors.BaseSelector, most: int) -> None:
        """Close the oldest unauthenticated connections.

        Otherwise they could exhaust the file descriptors.
        """
        unauthenticated = [link for link in self._links if not link.established]
        for link in unauthenticated[: max(0, len(unauthenticated) - most)]:
            self._drop(selector, link)

    def _drop(self, selector: selectors.BaseSelector, link: Link) -> None:
        selector.unregister(link)
        del self._links[link]
        self._table.forget(link)
        link.close()

    def _read(self, selector: selectors.BaseSelector, link: Link) -> None:
        try:
            for message in link.receive():
                self._deliver(self._table.apply(link, unpack(message), time.monotonic()))
            return
        except EOFError:
            pass  # the worker finished or died; its launcher knows which
        except AuthenticationError as error:
            logger.warning("the rendezvous refused a connection: %s", error)
        except (ValueError, struct.error) as error:
            logger.warning("the rendezvous closed a connection that sent an unreadable request: %s", error)
        self._drop(selector, link)

    def _deliver(self, answers: list[tuple[Link, list[bytes]]]) -> None:
        for link, reply in answers:
            with contextlib.suppress(OSError):  # the next read reports the end
                link.send(pack(reply))


@dataclass
class JoinedStore:
    """The key-value store that the ranks of a job agreed on."""

    #: This rank's topology, with the address and the secret of the store.
    topology: Topology
    #: The store's server, if it runs in this process.
    server: KeyValueServer | None = None
