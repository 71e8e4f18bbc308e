"""Receives the tasks' messages in the driver while they run.

Spark returns a task's rows only after the stage.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.wire.listener import Listener
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.sockets import Closing, keep_alive
from hvd_cluster.spark.messages import STOP, TaskLost, TaskStarted
from hvd_cluster.topology import join_address

logger = logging.getLogger(__name__)

#: Seconds that a peer has to prove that it is a task of the job.
_PROOF_S = 3.0
#: Connections that may authenticate at the same time; all tasks of a job do so at once.
_MAX_UNAUTHENTICATED = 512
#: Messages that may wait for the driver's main thread before the tasks have to wait too.
_MAX_WAITING = 100_000


class MessageServer(Closing):
    """Puts the tasks' messages into a queue. A context manager.

    Each task has its own thread, so that a task with much output does not delay the others.
    """

    def __init__(self, secret: bytes, host: str, messages: queue.SimpleQueue[Any]) -> None:
        self._messages = messages
        self._changed = threading.Condition()
        self._channels: list[Channel] = []
        self._readers: list[threading.Thread] = []
        self._stopping = self._closing = False
        # A connection counts as one of these until it is authenticated; then it gets a thread of its own.
        self._listener = Listener(
            secret,
            self._serve,
            [host],
            timeout_s=_PROOF_S,
            max_connections=_MAX_UNAUTHENTICATED,
            name="hvd-spark-listener",
            prepare=keep_alive,  # a task may send nothing for hours
            refusal_level=logging.WARNING,
        )
        self.port = self._listener.port

    def addresses(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """ "host:port" for each of the names of this host."""
        return tuple(join_address(host, self.port) for host in hosts)

    def stop_tasks(self) -> None:
        """Ask every task, also one that connects later, to stop its workers now.

        Spark's own kill takes seconds.
        """
        with self._changed:
            self._stopping = True
            for channel in self._channels:
                _send_stop(channel)

    def drain(self, timeout_s: float) -> None:
        """Wait until all tasks have closed their connections and all lines are here."""
        with self._changed:
            self._changed.wait_for(lambda: not self._channels, timeout_s)

    def close(self) -> None:
        """Stop listening. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._listener.close()
        with self._changed:
            channels, readers = list(self._channels), list(self._readers)
        for channel in channels:
            channel.close()
        for reader in readers:
            reader.join()

    def _serve(self, channel: Channel) -> None:
        reader = threading.Thread(target=self._read, args=(channel,), name="hvd-spark-messages", daemon=True)
        with self._changed:
            if self._closing:
                channel.close()
                return
            self._channels.append(channel)  # before the thread starts, so that its channel is known
            try:
                reader.start()
            except RuntimeError as error:  # the system allows no more threads
                logger.warning("the messages of a task cannot be received: %s", error)
                self._channels.remove(channel)
                channel.close()
                return
            self._readers = [one for one in self._readers if one.is_alive()] + [reader]
            if self._stopping:
                _send_stop(channel)

    def _read(self, channel: Channel) -> None:
        index: int | None = None
        try:
            while True:
                message = pickle.loads(channel.recv())  # the channel has checked that the message comes from the job
                if isinstance(message, TaskStarted):
                    index = message.index
                self._messages.put(message)
                while self._messages.qsize() > _MAX_WAITING and not self._closing:
                    time.sleep(0.02)  # the main thread cannot keep up, so the sender must wait
        except (EOFError, OSError, AuthenticationError):
            pass  # the task has ended or died; what the job does next shows which
        channel.close()
        if index is not None:
            self._messages.put(TaskLost(index))
        with self._changed:
            self._channels.remove(channel)
            self._changed.notify_all()


def _send_stop(channel: Channel) -> None:
    with contextlib.suppress(OSError):
        channel.send(STOP)
