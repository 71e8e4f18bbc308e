"""The driver's end of the side channel: Spark itself brings a task's rows only when the stage has ended."""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.reception import Reception
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.listening import listen
from hvd_cluster.rendezvous.tcp_keepalive import keep_alive
from hvd_cluster.spark.messages import STOP, Lost, Seated
from hvd_cluster.topology import join_address

logger = logging.getLogger(__name__)

#: Seconds that a caller has to prove that it is a task of the job.
_PROOF_S = 3.0
#: Connections that may prove themselves at the same time; all tasks of a job do so at once.
_MOST_STRANGERS = 512
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
        self._changed = threading.Condition()
        self._channels: list[Channel] = []
        self._readers: list[threading.Thread] = []
        self._stopping = self._closing = False
        listeners = listen([host])
        self.port: int = listeners[0].getsockname()[1]
        # A caller counts there until it has proved itself; a thread of its own hears it afterwards.
        self._reception = Reception(listeners, answer=self._welcome, most=_MOST_STRANGERS, name="hvd-spark-listener")

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
        self._reception.close(_PROOF_S)
        with self._changed:
            channels, readers = list(self._channels), list(self._readers)
        for channel in channels:
            channel.close()
        for reader in readers:
            reader.join()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)  # a task may say nothing for hours
            channel = Channel.accept(sock, self._secret, _PROOF_S)
        except (AuthenticationError, OSError) as error:
            logger.warning("a connection that is none of this job's tasks was refused: %s", error)
            sock.close()
            return
        reader = threading.Thread(target=self._hear_one, args=(channel,), name="hvd-spark-hear", daemon=True)
        with self._changed:
            if self._closing:
                channel.close()
                return
            self._channels.append(channel)  # first: what is heard comes over a channel that is known
            try:
                reader.start()
            except RuntimeError as error:  # as many threads as the system allows
                logger.warning("a task cannot be heard: %s", error)
                self._channels.remove(channel)
                channel.close()
                return
            self._readers = [one for one in self._readers if one.is_alive()] + [reader]
            if self._stopping:
                _tell_to_stop(channel)

    def _hear_one(self, channel: Channel) -> None:
        index: int | None = None
        try:
            while True:
                message = pickle.loads(channel.recv())  # the channel has checked that it comes from the job
                if isinstance(message, Seated):
                    index = message.index
                self._messages.put(message)
                while self._messages.qsize() > _MAX_WAITING and not self._closing:
                    time.sleep(0.02)  # the main thread cannot keep up: let the sender feel it
        except (EOFError, OSError, AuthenticationError):
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
