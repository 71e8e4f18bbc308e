"""Signed messages over a non-blocking socket, for event loops.

The store's server and the engine's tree use it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket

from hvd_cluster.rendezvous.session import SignedSession

_READ_BYTES = 1 << 18
#: Reads of one connection per turn, so that a peer that sends very much does not starve the others.
_MAX_READS = 16


class Link:
    """Signed messages over a non-blocking stream socket.

    The loop calls :meth:`receive` when the socket is readable and :meth:`flush` when it is writable; :attr:`events`
    says which of the two to wait for.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, accepts: bool) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            # Messages are small, and the peer waits for each of them.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._session = SignedSession(secret, accepts=accepts)
        self._early: list[bytes] = []
        #: Messages that one reader has received and left for the next.
        self.kept: list[bytes] = []

    @property
    def established(self) -> bool:
        """Whether the peer has proved that it knows the secret."""
        return self._session.established

    @property
    def events(self) -> int:
        """What a selector should wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._session.outgoing else 0)

    def send(self, message: bytes) -> None:
        """Queue one message and write as much as the socket accepts.

        Before the handshake, messages are kept.

        Raises:
            OSError: the connection is broken.
        """
        if not self._session.established:
            self._early.append(message)
            return
        self._session.seal(message)
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket accepts.

        Raises ``OSError`` if the connection is broken.
        """
        outgoing = self._session.outgoing
        while outgoing:
            try:
                num_bytes = self._socket.send(outgoing)
            except (BlockingIOError, InterruptedError):
                return
            del outgoing[:num_bytes]

    def receive(self) -> list[bytes]:
        """The messages that have arrived completely.

        Raises:
            EOFError: the peer has closed the connection or died.
            AuthenticationError: the peer does not know the secret, or a message was altered.
        """
        messages: list[bytes] = []
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise EOFError(str(error)) from error
            if not data:
                if messages:
                    break  # the next call reports the end
                raise EOFError("the peer closed the connection")
            messages += self._session.feed(data)
            if len(data) < _READ_BYTES:
                break
        if self._early and self._session.established:
            for message in self._early:
                self._session.seal(message)
            self._early.clear()
        with contextlib.suppress(OSError):  # the next read reports a broken connection
            self.flush()
        return messages

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._socket.close()
