"""A signed, message-wise connection over a stream socket, for code that may block."""

from __future__ import annotations

import collections
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.session import Session

_READ_BYTES = 1 << 20


class HungUpError(AuthenticationError):
    """The peer ended the connection before either had proved anything: it is crowded, ends, or serves others."""


class Channel:
    """Signed messages over a connected TCP or Unix stream socket. Make one with :meth:`connect` or :meth:`accept`.

    Any number of threads may send; one thread receives. What :meth:`recv` returns was signed with the job's secret, so
    it may be unpickled.
    """

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self._socket = sock
        self._session = session
        self._messages: collections.deque[bytes] = collections.deque()
        self._send_lock = threading.Lock()
        #: The session's, whose two directions share one TLS connection; never held while the socket is slow.
        self._session_lock = threading.Lock()
        # A signal handler may send or close while its own thread is in here.
        self._use_lock = threading.RLock()
        self._num_inside = 0
        self._is_closed = False

    @classmethod
    def connect(cls, sock: socket.socket, secret: bytes, timeout_s: float = 10.0) -> Channel:
        """Open the conversation as the end that connected.

        Raises:
            AuthenticationError: the peer does not hold ``secret``, or did not prove it within ``timeout_s``
                (:class:`HungUpError` where it ended the connection before).
        """
        return cls._establish(sock, Session(secret, accepts=False), timeout_s)

    @classmethod
    def accept(cls, sock: socket.socket, secret: bytes, timeout_s: float = 10.0) -> Channel:
        """Open the conversation as the end that accepted; raises as :meth:`connect` does."""
        return cls._establish(sock, Session(secret, accepts=True), timeout_s)

    @classmethod
    def _establish(cls, sock: socket.socket, session: Session, timeout_s: float) -> Channel:
        channel = cls(sock, session)
        deadline_s = time.monotonic() + timeout_s  # in all: a stranger may send a byte now and then
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
        """Send one message; blocks while the peer is slow.

        Raises:
            OSError: the connection is gone.
        """
        with self._send_lock:  # held while it is sent: what is sealed first goes first
            with self._session_lock:
                self._session.seal(message)
                outgoing = self._take_outgoing()
            with self._open_until_left():
                self._socket.sendall(outgoing)

    def recv(self) -> bytes:
        """The next message.

        Raises:
            EOFError: the peer closed the connection, or died.
            AuthenticationError: a message without the job's signature arrived.
            TimeoutError: :meth:`settimeout` was given and passed.
        """
        while not self._messages:
            try:
                with self._open_until_left():
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
        """The address of this end: the one of this host's addresses that reaches the peer. Empty on a Unix socket."""
        address = self._socket.getsockname()
        return str(address[0]) if isinstance(address, tuple) else ""

    def settimeout(self, timeout_s: float | None) -> None:
        """Let :meth:`recv` and :meth:`send` raise ``TimeoutError`` after ``timeout_s`` seconds of silence."""
        self._socket.settimeout(timeout_s)

    def set_receive_buffer(self, num_bytes: int) -> None:
        """Ask the kernel for a receive buffer of this size; it may grant less."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)

    def fileno(self) -> int:
        """The descriptor, for a selector, which cannot see the messages that have arrived behind the one received."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection; the peer sees the end. May be called twice, and from another thread."""
        with self._use_lock:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the threads inside, which then leave
            if not self._num_inside:
                self._socket.close()

    @contextlib.contextmanager
    def _open_until_left(self) -> Iterator[None]:
        """Keep the descriptor open while a thread uses the socket, even if another thread closes the channel.

        A thread on its way into the kernel would otherwise wait on the connection that gets the number next.
        """
        with self._use_lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the connection was closed at this end")
            self._num_inside += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._use_lock:
            self._num_inside -= 1
            if self._is_closed and not self._num_inside:
                self._socket.close()

    def _reject(self) -> None:
        """End the conversation, so that a peer whose proof came in the same packet does not wait for ours."""
        with contextlib.suppress(OSError):
            self._flush()  # with our own proof it can say what is wrong
            self._socket.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        if outgoing := self._take_outgoing():
            self._socket.sendall(outgoing)

    def _take_outgoing(self) -> bytearray:
        outgoing, self._session.outgoing = self._session.outgoing, bytearray()
        return outgoing
