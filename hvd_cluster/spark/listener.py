"""The driver's end of the side channel: Spark itself brings a task's rows only when the stage has ended."""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.spark.messages import STOP, Lost, Seated
from hvd_cluster.topology import join_address

logger = logging.getLogger(__name__)

#: Seconds that a caller has to prove that it is a task of the job.
_PROOF_S = 3.0
#: Messages that may wait for the driver's main thread before the tasks have to wait as well.
_MAX_WAITING = 100_000


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
            channel = Channel.accept(sock, self._secret, _PROOF_S)
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
        channel.send(STOP)
