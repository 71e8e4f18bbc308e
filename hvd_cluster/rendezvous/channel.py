"""Signed messages over a stream socket, for code that may block."""

from __future__ import annotations

import collections
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.session import SignedSession

_READ_BYTES = 1 << 20


class HungUpError(AuthenticationError):
    """The peer closed the connection during the authentication.

    It has too many connections, or is ending.
    """


class Channel:
    """Signed messages over a connected TCP or Unix stream socket.

    Made by :meth:`open`, :meth:`connect` or :meth:`accept`. Any number of threads may send; one thread receives. What
    :meth:`recv` returns was signed with the job's secret, so it may be unpickled.
    """

    def __init__(self, sock: socket.socket, session: SignedSession) -> None:
        self._socket = sock
        self._session = session
        self._messages: collections.deque[bytes] = collections.deque()
        # Reentrant, because a signal handler may send while its own thread does: the interrupted call then sends both.
        self._send_lock = threading.RLock()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._is_sending = False
        # Protects the session, whose two directions share one TLS connection; never held during I/O.
        self._session_lock = threading.Lock()
        # Reentrant, because a signal handler may send or close while its own thread holds the lock.
        self._use_lock = threading.RLock()
        self._num_users = 0
        self._is_closed = False

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        secret: bytes,
        timeout_s: float,
        prepare: Callable[[socket.socket], None],
        *,
        authentication_timeout_s: float | None = None,
    ) -> Channel:
        """Connect to a server at ``host`` and ``port``.

        Args:
            timeout_s: the limit for connecting.
            prepare: sets options of the new socket.
            authentication_timeout_s: the limit for the authentication; ``timeout_s`` by default.

        Raises:
            OSError: no server answers, or it cannot be authenticated (see :meth:`connect`).
        """
        sock = socket.create_connection((host, port), timeout=timeout_s)
        try:
            prepare(sock)
            return cls.connect(sock, secret, authentication_timeout_s or timeout_s)
        except BaseException:  # re-raised; no other code closes the socket
            sock.close()
            raise

    @classmethod
    def connect(cls, sock: socket.socket, secret: bytes, timeout_s: float = 10.0) -> Channel:
        """Authenticate as the end that connected.

        Raises:
            AuthenticationError: the peer did not prove within ``timeout_s`` that it knows ``secret``
                (:class:`HungUpError` if it closed the connection before).
        """
        return cls._establish(sock, SignedSession(secret, accepts=False), timeout_s)

    @classmethod
    def accept(cls, sock: socket.socket, secret: bytes, timeout_s: float = 10.0) -> Channel:
        """Authenticate as the end that accepted; raises as :meth:`connect` does."""
        return cls._establish(sock, SignedSession(secret, accepts=True), timeout_s)

    @classmethod
    def _establish(cls, sock: socket.socket, session: SignedSession, timeout_s: float) -> Channel:
        channel = cls(sock, session)
        deadline_s = time.monotonic() + timeout_s  # for the whole exchange: a peer could send one byte at a time
        sock.settimeout(timeout_s)
        try:
            channel._flush()
            while not session.established:
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise TimeoutError
                sock.settimeout(left_s)
                data = sock.recv(_READ_BYTES)
                if not data:
                    raise HungUpError("the peer closed the connection instead of proving that it holds the secret")
                channel._messages.extend(session.feed(data))
                channel._flush()
        except TimeoutError:
            raise AuthenticationError(
                f"the peer did not prove within {timeout_s:g} s that it holds the secret"
            ) from None
        except (ConnectionResetError, BrokenPipeError) as error:
            raise HungUpError(
                f"the peer ended the connection before it proved that it holds the secret: {error}"
            ) from None
        except AuthenticationError:
            channel._reject()
            raise
        sock.settimeout(None)
        return channel

    def send(self, message: bytes) -> None:
        """Send one message; block until the peer has received enough of those before.

        Raises:
            OSError: the connection is gone.
        """
        with self._send_lock:  # also during the I/O, so that messages are sent in the order of their numbers
            self._outbox.append(message)
            while self._outbox and not self._is_sending:
                self._is_sending = True
                try:
                    while self._outbox:
                        self._transmit(self._outbox.popleft())
                except BaseException:  # re-raised; the connection cannot be used any more
                    self._outbox.clear()
                    raise
                finally:
                    self._is_sending = False

    def _transmit(self, message: bytes) -> None:
        with self._session_lock:
            self._session.seal(message)
            outgoing = self._take_outgoing()
        with self._using_socket():
            self._socket.sendall(outgoing)

    def recv(self) -> bytes:
        """The next message.

        Raises:
            EOFError: the peer closed the connection, or died.
            AuthenticationError: a message without the job's signature arrived.
            TimeoutError: no message arrived within the limit of :meth:`settimeout`.
        """
        while not self._messages:
            try:
                with self._using_socket():
                    data = self._socket.recv(_READ_BYTES)
            except ConnectionResetError as error:
                raise EOFError("the peer reset the connection") from error
            if not data:
                raise EOFError("the peer closed the connection")
            with self._session_lock:
                messages = self._session.feed(data)
            self._messages.extend(messages)
        return self._messages.popleft()

    @property
    def local_host(self) -> str:
        """The address of this host on the route to the peer; empty on a Unix socket."""
        address = self._socket.getsockname()
        return str(address[0]) if isinstance(address, tuple) else ""

    def settimeout(self, timeout_s: float | None) -> None:
        """Set the seconds after which a blocked call raises ``TimeoutError``.

        The calls are :meth:`recv` and :meth:`send`.
        """
        self._socket.settimeout(timeout_s)

    def set_receive_buffer(self, num_bytes: int) -> None:
        """Ask the kernel for a receive buffer of this size; it may grant less."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)

    def fileno(self) -> int:
        """The descriptor, for a selector.

        A selector does not see messages that this channel has already read.
        """
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection; the peer sees the end.

        May be called twice, and from another thread.
        """
        with self._use_lock:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the threads that use it
            if not self._num_users:
                self._socket.close()

    @contextlib.contextmanager
    def _using_socket(self) -> Iterator[None]:
        """Keep the descriptor open while a thread uses the socket.

        Another thread may close the channel meanwhile. Otherwise the thread could use another connection that got the
        same descriptor.
        """
        with self._use_lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the connection was closed at this end")
            self._num_users += 1
        try:
            yield
        finally:
            self._release_socket()

    def _release_socket(self) -> None:
        with self._use_lock:
            self._num_users -= 1
            if self._is_closed and not self._num_users:
                self._socket.close()

    def _reject(self) -> None:
        """Close the connection, so that the peer does not wait for our proof."""
        with contextlib.suppress(OSError):
            self._flush()  # from our proof the peer can see what is wrong
            self._socket.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        if outgoing := self._take_outgoing():
            self._socket.sendall(outgoing)

    def _take_outgoing(self) -> bytearray:
        outgoing, self._session.outgoing = self._session.outgoing, bytearray()
        return outgoing
