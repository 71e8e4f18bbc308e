"""Another host as the launcher sees it, and its workers.

The agent there runs them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.reachability import HostAddresses
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.wire.agent_messages import (
    END,
    RECEIVE_BUFFER_BYTES,
    Acknowledged,
    AgentHandshake,
    Probe,
    ProbeResult,
    ReceiveWindow,
    SignalWorker,
    StartFailed,
    StartWorker,
    WorkerSignal,
    WorkerStatus,
)
from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.topology import Topology

logger = logging.getLogger(__name__)


class RemoteWorker(Worker):
    """A worker on another host."""

    def __init__(self, host: RemoteHost, key: int, topology: Topology, callbacks: Callbacks) -> None:
        super().__init__(topology.rank, callbacks)
        self._host = host
        self._key = key
        self._host_name = topology.host
        self._place = f"not started yet on {topology.host}"
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def place(self) -> str:
        return self._place

    def write_stack(self) -> None:
        self._host.send(SignalWorker(self._key, WorkerSignal.WRITE_STACK))

    def terminate(self) -> None:
        self._host.send(SignalWorker(self._key, WorkerSignal.TERMINATE))

    def kill(self) -> None:
        self._host.send(SignalWorker(self._key, WorkerSignal.KILL))

    def wait(self) -> Outcome | None:
        self._ended.wait()
        return self.outcome

    def handle(self, message: OutputLine | ProgressEvent | WorkerStatus | StartFailed) -> None:
        """Handle a message of the agent about this worker."""
        if isinstance(message, OutputLine):
            self._tail.add(message.text)
            with self._passing_on():
                self._callbacks.on_line(self.rank, message.stream, message.text)
            return
        if isinstance(message, ProgressEvent):
            with self._passing_on():
                self._callbacks.on_event(self.rank, message.fields)
            return
        if isinstance(message, StartFailed):
            self.lose(f"could not be started on {self._host_name}: {message.why}")
            return
        self.ready, self._place = message.ready, message.place
        self.reported = message.reported and replace(message.reported, output_tail=self.output_tail)
        if message.outcome is not None:
            self._set_outcome(replace(message.outcome, output_tail=self.output_tail))
        self._callbacks.on_change()

    def lose(self, why: str) -> None:
        """Nothing more will be received from it."""
        text = f"rank {self.rank} {why}"
        outcome = Outcome(
            self.rank,
            self._host_name,
            error=ErrorReport("LaunchError", text, f"hvd_cluster.errors.LaunchError: {text}\n"),
            finished_at=time.time(),
            output_tail=self.output_tail,
            ending_text=why,
        )
        if self._set_outcome(outcome):
            self._callbacks.on_change()

    def _set_outcome(self, outcome: Outcome) -> bool:
        """Set its outcome; return False if it already has one.

        The first one counts.
        """
        with self._lock:
            if self.outcome is not None:
                return False
            self.outcome = outcome
        self._ended.set()
        return True


class RemoteHost:
    """Another host whose agent has connected or will connect."""

    def __init__(self, host: Host, on_change: Callable[[], None]) -> None:
        self.host = host
        #: The agent's handshake; None before it has connected.
        self.handshake: AgentHandshake | None = None
        #: The launcher's address that the agent reached.
        self.launcher_address = ""
        #: Why the host cannot be used (any more); empty while it can.
        self.gone = ""
        #: It is gone, and the outcomes of its workers are known.
        self.is_lost = False
        self._on_change = on_change
        self._lock = threading.Lock()
        self._workers: dict[int, RemoteWorker] = {}
        self._changed = threading.Condition()
        self._probes = itertools.count()
        # Results of probe() by its number, None until one has arrived; late ones are dropped.
        self._reached: dict[int, Mapping[str, tuple[str, ...]] | None] = {}
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None

    def attach(self, handshake: AgentHandshake, channel: Channel) -> None:
        """The agent has connected."""
        self.launcher_address = channel.local_host
        channel.set_receive_buffer(RECEIVE_BUFFER_BYTES)
        self._channel = channel
        self.handshake = handshake
        self._reader = threading.Thread(target=self._read, args=(channel,), name=f"hvd-{self.host.name}", daemon=True)
        self._reader.start()
        self._notify()

    def refuse(self, why: str) -> None:
        """The agent that has connected cannot be used."""
        self._lose(why)

    def probe(self, candidates: tuple[HostAddresses, ...], timeout_s: float) -> Mapping[str, tuple[str, ...]]:
        """Make the agent probe other hosts.

        Returns the addresses that answered by host; nothing if it is gone.
        """
        with self._changed:
            number = next(self._probes)
            self._reached[number] = None
        self.send(Probe(candidates, number))
        with self._changed:
            self._changed.wait_for(lambda: self._reached[number] is not None or bool(self.gone), timeout_s)
            return self._reached.pop(number) or {}

    def start(
        self, key: int, task: Task, topology: Topology, env: Mapping[str, str | None], callbacks: Callbacks
    ) -> RemoteWorker:
        """Start a worker there; its outcome is a failure if the host is gone."""
        worker = RemoteWorker(self, key, topology, callbacks)
        with self._lock:
            gone = self.gone
            if not gone:
                self._workers[key] = worker
        if gone:
            worker.lose(f"could not be started: {gone}")
        else:
            # The channel is authenticated but not encrypted, and the agent has the secret.
            self.send(StartWorker(key, task, replace(topology, secret=b""), env))
        return worker

    def send(self, message: object) -> None:
        """Send the agent a message; no effect if it is gone."""
        with contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(pickle.dumps(message))

    def request_end(self) -> None:
        """Ask the agent to stop all workers and exit."""
        with contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(END)

    def close(self, deadline_s: float) -> None:
        """Wait for the agent's end until ``deadline_s``, then close the connection.

        ``deadline_s`` is a ``time.monotonic``.
        """
        if self._reader is not None:
            self._reader.join(max(0.0, deadline_s - time.monotonic()))
        if self._channel is not None:
            self._channel.close()
        if self._reader is not None:
            self._reader.join()

    def _read(self, channel: Channel) -> None:
        why = "the connection to its agent ended"
        window = ReceiveWindow()
        try:
            while True:
                message = channel.recv()
                self._handle(received := pickle.loads(message))
                if isinstance(received, OutputLine) and (num_bytes := window.add(len(message))):
                    self.send(Acknowledged(num_bytes))
        except AuthenticationError as error:
            why = f"its agent sent a message without the job's signature: {error}"
        except EOFError:
            pass
        except OSError as error:
            why = f"it no longer answers: {error.strerror or error}"
        except Exception as error:  # unpickling and handling may raise anything; without this thread the job would wait
            logger.exception("a message of the agent of %s cannot be handled", self.host.name)
            why = f"a message of its agent cannot be handled: {type(error).__name__}: {error}"
        channel.close()  # the host may return with another connection, any number of times
        self._lose(f"lost its host {self.host.name}: {self._explain(why)}")

    def _explain(self, why: str) -> str:
        """Add what is known about the end of the connection to ``why``."""
        return why

    def _handle(self, message: ProbeResult | OutputLine | ProgressEvent | WorkerStatus | StartFailed) -> None:
        if isinstance(message, ProbeResult):
            with self._changed:
                if message.number in self._reached:
                    self._reached[message.number] = message.addresses
            self._notify()
            return
        with self._lock:
            worker = self._workers.get(message.key)
        if worker is not None:
            worker.handle(message)
            if worker.outcome is not None:  # nothing follows, and an elastic job has any number of workers
                with self._lock:
                    self._workers.pop(message.key, None)

    def _lose(self, why: str) -> None:
        with self._lock:
            self.gone = self.gone or why
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.lose(self.gone)
        self.is_lost = True
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._on_change()
