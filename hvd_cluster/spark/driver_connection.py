"""A task's connection to the driver, for messages while the task runs.

A task also works without it.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.logs import prefixed
from hvd_cluster.launch.wire.messages import STALLED_S, OutputLine
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.sockets import Closing, keep_alive
from hvd_cluster.spark.messages import STOP, Message
from hvd_cluster.topology import split_address

#: Seconds in which a task tries to reach the driver at all its addresses. Behind a remote Connect server it never can.
_PROBE_S = 3.0


class DriverConnection(Closing):
    """A task's end. Thread-safe; without a connection messages are dropped."""

    def __init__(self, addresses: Sequence[str], secret: bytes) -> None:
        #: Set when the driver asks for a stop, or has died.
        self.stop_requested = threading.Event()
        self._closing = self._broken = False
        self._channel, self._address = reach_driver(addresses, secret)
        if self._channel is not None:
            self._channel.settimeout(STALLED_S)
        self._thread: threading.Thread | None = None
        if self._channel is not None:
            self._thread = threading.Thread(target=self._listen, args=(self._channel,), name="hvd-driver-connection")
            self._thread.daemon = True
            self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether messages reach the driver."""
        return self._channel is not None and not self._broken

    def send(self, message: Message) -> None:
        """Send a message to the driver.

        Without a driver a worker's line goes to the executor's log; other messages are dropped.
        """
        channel = self._channel
        if channel is not None and not self._broken:
            try:
                channel.send(pickle.dumps(message))
                return
            except (OSError, AuthenticationError):
                self._broken = True  # perhaps half a message was sent; a stalled driver can still send STOP
        if isinstance(message, OutputLine):
            sys.stderr.write(prefixed(message.key, message.stream, message.text) + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Close the connection.

        Nothing of it remains in the task's process, which Spark reuses.
        """
        self._closing = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._thread is not None:
            self._thread.join()

    def _listen(self, channel: Channel) -> None:
        while not self._closing:
            try:
                if channel.recv() == STOP:
                    self.stop_requested.set()
            except TimeoutError:
                continue
            except (EOFError, OSError, AuthenticationError):
                break
        if not self._closing:
            time.sleep(0.2)  # a dying process closes its sockets one after the other
            if _is_refused(self._address):
                self.stop_requested.set()  # no process waits for this job any more
        channel.close()


def reach_driver(
    addresses: Sequence[str], secret: bytes, prepare: Callable[[socket.socket], None] = keep_alive
) -> tuple[Channel | None, str]:
    """Connect to the driver.

    Returns the channel and the address at which the driver answered, or None and "".
    """
    deadline_s = time.monotonic() + _PROBE_S
    for position, address in enumerate(addresses):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        host, port = split_address(address)
        timeout_s = left_s / (len(addresses) - position)
        with contextlib.suppress(OSError):
            channel = Channel.open(host, int(port), secret, timeout_s, prepare, authentication_timeout_s=_PROBE_S)
            return channel, address
    return None, ""


def _is_refused(address: str) -> bool:
    """Whether the driver's host answers that no process listens on the port any more."""
    host, port = split_address(address)
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
