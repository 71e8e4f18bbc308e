"""What tasks tell the driver while they run: Spark itself brings rows only when the stage has ended.

The driver listens (:class:`Listener`); each task calls (:class:`DriverLine`) and goes on without where it cannot get
through, as behind a remote Connect server.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.logs import prefixed
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.topology import join_address, split_address

logger = logging.getLogger(__name__)

#: Seconds that a task tries to reach the driver, all addresses together.
PROBE_S = 3.0
#: Seconds after which a driver that takes no more output is given up.
_STALLED_S = 60.0
#: Messages that may wait for the driver's main thread before the tasks have to wait as well.
_MAX_WAITING = 100_000
_STOP = b"stop"


@dataclass(frozen=True)
class Seated:
    """A barrier task runs; ``index`` is its partition."""

    index: int
    host: str


@dataclass(frozen=True)
class Placed:
    """The task has learnt its rank and starts its worker; ``host`` is the address for the other workers."""

    index: int
    rank: int
    host: str


@dataclass(frozen=True)
class Warned:
    """Something that the user should know."""

    text: str


@dataclass(frozen=True)
class Line:
    """A line that a worker wrote to ``stream`` ("stdout" or "stderr")."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True)
class Event:
    """What a worker reported with ``launch.progress.report``."""

    rank: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """A worker ended; the outcome has no value, which comes as a row of the job."""

    outcome: Outcome


@dataclass(frozen=True)
class Lost:
    """The connection of a task ended: all is done, or its executor died."""

    index: int


Message = Seated | Placed | Warned | Line | Event | Ended | Lost


class Listener:
    """The driver's end: puts what tasks tell into a queue. A context manager.

    A thread per task reads, so that a task that floods us with output keeps no other one waiting.

    Args:
        secret: the job's secret; who does not hold it is not listened to.
        host: the address to listen on.
        messages: where the messages go.
    """

    def __init__(self, secret: bytes, host: str, messages: queue.SimpleQueue[Any]) -> None:
        self._secret = secret
        self._messages = messages
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self._bell, self._bell_far_end = socket.socketpair()
        self._changed = threading.Condition()
        self._channels: list[Channel] = []
        self._readers: list[threading.Thread] = []
        self._stopping = self._closing = False
        self._thread = threading.Thread(target=self._welcome_all, name="hvd-spark-listener", daemon=True)
        self._thread.start()

    def addresses(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """ "host:port" for each of the names of this host."""
        return tuple(join_address(host, self.port) for host in hosts)

    def stop_tasks(self) -> None:
        """Ask every task, also those that call later, to stop its worker now; Spark's own kill comes seconds later."""
        with self._changed:
            self._stopping = True
            for channel in self._channels:
                _tell_to_stop(channel)

    def drain(self, timeout_s: float) -> None:
        """Wait until every task has closed its connection, so that no line is still on its way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._channels, timeout_s)

    def close(self) -> None:
        """Stop listening. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._bell.close()
        self._thread.join()
        with self._changed:
            for channel in self._channels:
                channel.close()
        for reader in self._readers:
            reader.join()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _welcome_all(self) -> None:
        with self._socket, self._bell_far_end, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._bell_far_end, selectors.EVENT_READ)
            while self._bell_far_end not in [key.fileobj for key, _ in selector.select()]:
                with contextlib.suppress(ConnectionError):
                    sock, _ = self._socket.accept()
                    reader = threading.Thread(target=self._hear_one, args=(sock,), name="hvd-spark-hear", daemon=True)
                    self._readers = [one for one in self._readers if one.is_alive()] + [reader]
                    reader.start()

    def _hear_one(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel.accept(sock, self._secret, PROBE_S)
        except (AuthenticationError, OSError) as error:
            logger.warning("a connection that is none of this job's tasks was refused: %s", error)
            sock.close()
            return
        with self._changed:
            self._channels.append(channel)
            if self._stopping:
                _tell_to_stop(channel)
            if self._closing:
                channel.close()
        index: int | None = None
        try:
            while True:
                message = pickle.loads(channel.recv())  # the channel has checked that it comes from the job
                if isinstance(message, Seated):
                    index = message.index
                self._messages.put(message)
                while self._messages.qsize() > _MAX_WAITING and not self._closing:
                    time.sleep(0.02)  # the main thread cannot keep up: let the sender feel it
        except (EOFError, OSError):
            pass  # the task has ended, or died: what the job does next tells which
        channel.close()
        if index is not None:
            self._messages.put(Lost(index))
        with self._changed:
            self._channels.remove(channel)
            self._changed.notify_all()


def _tell_to_stop(channel: Channel) -> None:
    with contextlib.suppress(OSError):
        channel.send(_STOP)


class DriverLine:
    """A task's end. It may be used from any thread, also when there is no connection.

    Args:
        addresses: "host:port" candidates; the first that answers and holds ``secret`` is taken.
    """

    def __init__(self, addresses: Sequence[str], secret: bytes) -> None:
        #: Set when the driver asks for a stop, or has died.
        self.stop_requested = threading.Event()
        self._closing = False
        self._channel, self._address = _reach(addresses, secret)
        self._thread: threading.Thread | None = None
        if self._channel is not None:
            self._thread = threading.Thread(target=self._listen, args=(self._channel,), name="hvd-driver-line")
            self._thread.daemon = True
            self._thread.start()

    @property
    def connected(self) -> bool:
        """True while messages reach the driver."""
        return self._channel is not None

    def tell(self, message: Message) -> None:
        """Send ``message``. Without a driver a worker's line goes to the executor's log, anything else nowhere."""
        channel = self._channel
        if channel is not None:
            try:
                channel.send(pickle.dumps(message))
                return
            except (OSError, AuthenticationError):
                self._channel = None
        if isinstance(message, Line):
            sys.stderr.write(prefixed(message.rank, message.stream, message.text) + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Close the connection; nothing of it stays in the task's process, which Spark reuses."""
        self._closing = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> DriverLine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _listen(self, channel: Channel) -> None:
        while not self._closing:
            try:
                if channel.recv() == _STOP:
                    self.stop_requested.set()
            except TimeoutError:
                continue
            except (EOFError, OSError):
                break
        if not self._closing:
            time.sleep(0.2)  # a process that dies closes its sockets one after the other
            if _is_refused(self._address):
                self.stop_requested.set()  # nobody waits for this job any more
        channel.close()


def _reach(addresses: Sequence[str], secret: bytes) -> tuple[Channel | None, str]:
    deadline_s = time.monotonic() + PROBE_S
    for position, address in enumerate(addresses):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        host, port = split_address(address)
        try:
            sock = socket.create_connection((host, int(port)), timeout=left_s / (len(addresses) - position))
        except OSError:
            continue
        # Firewalls forget connections that are silent for long.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            channel = Channel.connect(sock, secret, PROBE_S)
        except (AuthenticationError, OSError):
            sock.close()
            continue
        channel.settimeout(_STALLED_S)
        return channel, address
    return None, ""


def _is_refused(address: str) -> bool:
    """True when the driver's host answers that nobody listens there any more."""
    host, port = split_address(address)
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
