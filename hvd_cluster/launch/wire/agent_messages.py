"""The messages between the launcher and its agent on a remote host.

They are pickled, over an authenticated channel. The first one, :class:`BootstrapMessage`, goes to the agent's standard
input, because it contains secrets.

``key`` identifies a worker among all that the launcher has started. A rank does not: in an elastic job several workers
may have the same rank one after the other.

The agent limits how much output it sends before the launcher has acknowledged it. A launcher may be stopped with
Ctrl-Z, or print into a pager that waits for a key. The workers' output would then fill the TCP connection, and Linux
treats a host that reads nothing as dead (see :func:`hvd_cluster.rendezvous.sockets.detect_dead_host`). Therefore the
agent never sends more than a window of unacknowledged bytes, as in HTTP/2's flow control (RFC 9113, section 5.2), and
the connection is never full.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum

from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.reachability import HostAddresses
from hvd_cluster.launch.task import Task
from hvd_cluster.topology import Topology


@dataclass(frozen=True, kw_only=True)
class BootstrapMessage:
    """Where the launcher is, and what the agent needs to connect to it."""

    #: The name that the launcher uses for the agent's host.
    name: str
    #: The launcher's addresses; the agent uses the first one that it can reach.
    addresses: Sequence[str]
    #: The launcher's port.
    port: int
    #: The job's secret, in hexadecimal digits.
    secret: str = field(repr=False)
    #: The working directory of the workers.
    cwd: str
    #: The driver's ``sys.path``.
    sys_path: Sequence[str]
    #: Names, or prefixes of names, of the network interfaces to use; if empty, a probe decides.
    interfaces: Sequence[str] = field(default_factory=list)
    #: Variables for the workers; None removes a variable. They may contain passwords and keys.
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)

    def to_line(self) -> bytes:
        """This message as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> BootstrapMessage:
        """The inverse of :meth:`to_line`.

        Raises:
            ValueError: the line is not such a message.
        """
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("the launcher's bootstrap message is not a JSON object")
        known = {one.name for one in fields(cls)}
        # A launcher of another version may send more. It reports the difference once this agent has connected.
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class AgentHandshake:
    """To the launcher: the agent runs."""

    #: The name that the launcher uses for this host.
    name: str
    #: Equal for two agents if and only if they run on one machine, in one container and network namespace.
    host_key: str
    #: The host's own name.
    hostname: str
    #: Interface -> its address.
    interfaces: Mapping[str, str]
    #: The address of this host on the route to the launcher.
    address: str
    #: The port of the agent's probe listener.
    probe_port: int
    #: A free port for torch.distributed's own rendezvous.
    master_port: int
    #: Each worker sees only its own devices, so workers on this machine must not count as each other's neighbours.
    owns_devices: bool = False
    #: The version of hvd_cluster on that host; empty if the agent does not send it.
    version: str = ""


@dataclass(frozen=True)
class Probe:
    """To the agent: connect to these hosts and answer with :class:`ProbeResult`."""

    candidates: tuple[HostAddresses, ...]
    #: Identifies this probe.
    number: int


@dataclass(frozen=True)
class ProbeResult:
    """To the launcher: host -> the addresses at which it answered."""

    addresses: Mapping[str, tuple[str, ...]]
    #: The number of the :class:`Probe`.
    number: int


@dataclass(frozen=True)
class StartWorker:
    """To the agent: start a worker."""

    key: int
    task: Task
    #: Without the secret, which the agent has.
    topology: Topology
    env: Mapping[str, str | None]


class WorkerSignal(Enum):
    """What an agent sends to a worker.

    The methods of :class:`~hvd_cluster.launch.worker_group.Worker`.
    """

    WRITE_STACK = "write_stack"
    TERMINATE = "terminate"
    KILL = "kill"


@dataclass(frozen=True)
class SignalWorker:
    """To the agent: send a signal to a worker."""

    key: int
    signal: WorkerSignal


@dataclass(frozen=True)
class Acknowledged:
    """To the agent: this many bytes of output were passed on.

    See :mod:`hvd_cluster.launch.wire.agent_messages`.
    """

    num_bytes: int


@dataclass(frozen=True)
class WorkerStatus:
    """To the launcher: the state of a worker has changed."""

    key: int
    ready: bool
    reported: Outcome | None
    outcome: Outcome | None
    #: :attr:`Worker.place <hvd_cluster.launch.worker_group.Worker.place>`.
    place: str = ""


@dataclass(frozen=True)
class StartFailed:
    """To the launcher: a worker could not be started."""

    key: int
    why: str


#: To the agent: all addresses are known; close the probe listener.
STOP_PROBING = "complete"
#: To the agent: stop all workers and exit.
END = b""


#: Bytes of output that may be unacknowledged.
WINDOW_BYTES = 1 << 15
#: The receiver acknowledges in steps of this size, which saves messages; a smaller remainder stays unacknowledged.
_STEP_BYTES = WINDOW_BYTES // 4
#: The receive buffer of the launcher's socket. Short lines, each in its own packet, take ten times their size there.
#: Linux doubles the requested size, by default up to 416 KiB.
RECEIVE_BUFFER_BYTES = 1 << 18


class SendWindow:
    """The sender's side: waits until bytes may be sent."""

    def __init__(self) -> None:
        self._num_in_flight = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def acquire(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may be sent.

        An oversized message waits until nearly all are acknowledged.
        """
        room = max(_STEP_BYTES, WINDOW_BYTES - num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_in_flight <= room)
            self._num_in_flight += num_bytes

    def release(self, num_bytes: int) -> None:
        """The receiver has acknowledged ``num_bytes``."""
        with self._changed:
            self._num_in_flight -= num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Stop waiting: the connection is closed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class ReceiveWindow:
    """The receiver's side: counts bytes that are not acknowledged yet."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> int:
        """Count bytes as received; return how many to acknowledge now, or 0."""
        self._num_bytes += num_bytes
        if self._num_bytes < _STEP_BYTES:
            return 0
        due, self._num_bytes = self._num_bytes, 0
        return due
