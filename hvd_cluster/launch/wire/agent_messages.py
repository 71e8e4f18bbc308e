"""What the launcher and its agent on a remote host say to each other, pickled, over a signed channel.

``key`` names a worker among all that the launcher has started: an elastic job gives a rank to several, one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.reachability import HostAddresses
from hvd_cluster.launch.task import Task
from hvd_cluster.topology import Topology


@dataclass(frozen=True)
class AgentHandshake:
    """To the launcher: the agent runs."""

    #: The host as the launcher named it.
    name: str
    #: Equal for two agents if and only if they run on one machine (in one container, in one network namespace).
    host_key: str
    #: What the host calls itself.
    hostname: str
    #: Interface -> its address.
    interfaces: Mapping[str, str]
    #: This host's address on the way to the launcher.
    address: str
    #: Port of the agent's probe_listener.
    probe_port: int
    #: A free port for torch.distributed's own rendezvous.
    master_port: int
    #: Each of its workers sees devices of its own only, so none is to count workers of this machine as beside it.
    owns_devices: bool = False
    #: That of hvd_cluster there; whatever an agent of another version leaves out is empty.
    version: str = ""


@dataclass(frozen=True)
class Probe:
    """To the agent: call these hosts, answer with :class:`ProbeResult`."""

    claims: tuple[HostAddresses, ...]
    #: Tells this call from others.
    number: int


@dataclass(frozen=True)
class ProbeResult:
    """To the launcher: host -> the addresses at which it answered."""

    addresses: Mapping[str, tuple[str, ...]]
    #: That of the :class:`Probe`.
    number: int


@dataclass(frozen=True)
class StartWorker:
    """To the agent: start a worker."""

    key: int
    task: Task
    #: Without the secret, which the agent knows.
    topology: Topology
    env: Mapping[str, str | None]


@dataclass(frozen=True)
class SignalWorker:
    """To the agent: signal a worker's process group."""

    key: int
    #: SIGKILL rather than SIGTERM.
    kill: bool


@dataclass(frozen=True)
class Acknowledged:
    """To the agent: so much of the workers' output was passed on; see :mod:`hvd_cluster.launch.wire.flow_control`."""

    num_bytes: int


@dataclass(frozen=True)
class WorkerStatus:
    """To the launcher: a worker has changed."""

    key: int
    ready: bool
    reported: Outcome | None
    outcome: Outcome | None


@dataclass(frozen=True)
class StartFailed:
    """To the launcher: a worker could not be started."""

    key: int
    why: str


#: To the agent: all hosts know how they reach each other, nobody asks any more.
STOP_PROBING = "complete"
#: To the agent: end.
END = b""
