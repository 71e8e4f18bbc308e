"""The hosts of a job, this one and others: connected, reachable for each other, and ready to start workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch import reachability
from hvd_cluster.launch.environment import exportable, found_interface_variables
from hvd_cluster.launch.hosts import LOOPBACK, Host, is_local
from hvd_cluster.launch.interfaces import named, outward_interfaces
from hvd_cluster.launch.logs import OnLine
from hvd_cluster.launch.placement import Placement, Slot
from hvd_cluster.launch.ports import ReservedPort
from hvd_cluster.launch.process import OnEvent, ignore_event
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.ssh.agent_hub import AgentHub
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task, start_worker
from hvd_cluster.launch.worker_group import Worker
from hvd_cluster.rendezvous.listening import ANY
from hvd_cluster.rendezvous.reach import host_key
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology, inherited, join_address

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 30.0
#: Seconds between two looks whether to go on waiting.
_GIVE_UP_POLL_S = 0.2


@dataclass
class _FleetHost:
    """What the fleet knows of one host."""

    host: Host
    host_key: str
    interfaces: Mapping[str, str]
    master_port: int
    #: Where its workers find the rendezvous.
    rendezvous: str
    #: Where the other hosts reach it.
    address: str
    #: The interface of that address, where others than this host take part.
    interface: str = ""
    #: None for this host.
    remote: RemoteHost | None = None
    #: This connection to it has been part of a probe.
    is_probed: bool = False


class Fleet:
    """A context manager over the connections to the hosts of one job, and its rendezvous.

    Args:
        secret: the job's secret.
        options: how ssh is called.
        interfaces: names, or beginnings of names, of the network interfaces to use; none leaves the choice to a probe.
        on_change: called, from another thread, when a host has gone.
        env: variables of all tasks to come, where they are known: they go to other hosts through ssh, unseen.
    """

    def __init__(
        self,
        secret: bytes,
        options: SshOptions | None = None,
        interfaces: Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.secret = secret
        self._options = options or SshOptions()
        self._wanted = list(interfaces)
        self._on_change = on_change
        self._exported: dict[str, str | None] = {**exportable(inherited()), **(env or {})}
        self._agent_hub: AgentHub | None = None
        self._hosts: dict[str, _FleetHost] = {}
        self._given_up = threading.Event()
        self._keys = itertools.count()
        self._stack = contextlib.ExitStack()
        self._server: KeyValueServer | None = None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def server(self) -> KeyValueServer:
        """The job's rendezvous; there is none before :meth:`connect`."""
        assert self._server is not None
        return self._server

    def connect(self, hosts: Sequence[Host]) -> None:
        """Reach all ``hosts``, and let them find out how they reach each other. No others can be added afterwards.

        Args:
            hosts: those of the job.

        Raises:
            LaunchError: a host cannot be reached through ssh, or not from the others; all such hosts are named.
        """
        local = {host.name for host in hosts if is_local(host.name)}
        others = [host for host in hosts if host.name not in local]
        self._open(others=bool(others), takes_part=bool(local))
        for host in hosts:
            if host.name in local:
                self._add_local(host)
        if others:
            self._connect_remotes(others, patient=True)
            if lost := self.probe():
                raise reachability.unreachable(lost)
            assert self._agent_hub is not None
            self._agent_hub.complete()
        self._hosts = {host.name: self._hosts[host.name] for host in hosts}

    def open(self, *, others: bool) -> None:
        """Start the rendezvous, and, if there may be other hosts, the listener for their agents."""
        if self._server is None:
            self._open(others=others, takes_part=False)

    def _open(self, *, others: bool, takes_part: bool) -> None:
        try:
            # Other hosts' workers find it at the address by which their agent came; see rendezvous().
            self._server = self._stack.enter_context(KeyValueServer(self.secret, LOOPBACK))
            if others:
                self._agent_hub = AgentHub(
                    self.secret,
                    self._options,
                    self._wanted,
                    self._on_change,
                    takes_part=takes_part,
                    env=self._exported,
                )
                self._stack.callback(self._agent_hub.close)
        except OSError as error:
            raise LaunchError(f"the launcher cannot open a port: {error}") from error

    def add(self, host: Host) -> str:
        """Reach one more host of a job that runs. Returns why it cannot be used, or an empty string."""
        if host.name in self._hosts:
            entry = self._hosts[host.name]
            if entry.remote is None or not entry.remote.gone:
                entry.host = host
                return ""
            # Until it is reached again, what is known of it stays: its last workers may not be reaped yet.
            if self._agent_hub is not None:
                self._agent_hub.drop(host.name)
        try:
            if is_local(host.name):
                self._add_local(host)
            else:
                self._connect_remotes([host], patient=False)
        except LaunchError as error:
            return str(error)
        return ""

    def give_up(self) -> None:
        """Wait for no host any more: what other threads wait for in :meth:`add` and :meth:`probe` ends soon."""
        self._given_up.set()
        if self._agent_hub is not None:
            self._agent_hub.give_up()

    def unprobed(self) -> set[str]:
        """Hosts that were connected, for the first time or again, since the last :meth:`probe`."""
        return {name for name, entry in list(self._hosts.items()) if not entry.is_probed}

    def is_lost(self, name: str) -> bool:
        """Whether that host has gone, and how its workers ended is known; it may be in the course of coming back."""
        entry = self._hosts.get(name)
        return entry is not None and entry.remote is not None and entry.remote.is_over

    def host_key(self, name: str) -> str:
        """Equal for two names that mean the same machine."""
        return self._hosts[name].host_key

    def slots(self, hosts: Sequence[Host]) -> list[Slot]:
        """A slot for each slot of ``hosts``, which must be connected, in their order."""
        slots = [self._hosts[host.name] for host in hosts for _ in range(host.slots)]
        return [Slot(index, entry.host_key, entry.address) for index, entry in enumerate(slots)]

    def names(self, hosts: Sequence[Host]) -> list[str]:
        """The name of the host of each of :meth:`slots`."""
        return [host.name for host in hosts for _ in range(host.slots)]

    def topology(self, placement: Placement, name: str, first: str, job_id: str, generation: int = 0) -> Topology:
        """A worker's place as its own host sees the job.

        Args:
            placement: its indices.
            name: its host.
            first: the host of rank 0.
            job_id: the job.
            generation: the world's number in an elastic job.
        """
        first_entry = self._hosts[first]
        return placement.topology(
            rendezvous=self.rendezvous(name),
            secret=self.secret,
            master=join_address(self._seen_from_elsewhere(first_entry, first_entry.address), first_entry.master_port),
            job_id=job_id,
            generation=generation,
        )

    def rendezvous(self, name: str) -> str:
        """Where workers of that host find the job's store."""
        entry = self._hosts[name]
        address = self._seen_from_elsewhere(entry, entry.rendezvous)
        try:
            return join_address(address, self.server.port_at(address))
        except OSError as error:
            raise LaunchError(f"the launcher cannot open a port at {address}: {error}") from error

    def _seen_from_elsewhere(self, entry: _FleetHost, address: str) -> str:
        """``address``, unless it is this host's loopback and there are other hosts by now."""
        if entry.remote is not None or address != LOOPBACK or entry.interface:
            return address
        remotes = self._agent_hub.remotes.values() if self._agent_hub is not None else ()
        return next((remote.launcher_address for remote in remotes if remote.launcher_address), address)

    def interface(self, name: str) -> str:
        """The interface by which the others reach that host; empty where there are no others."""
        return self._hosts[name].interface

    def gpus(self, worker: str) -> tuple[str, ...]:
        """The GPUs that were assigned to the worker of that name in its topology; none where nobody assigns any."""
        return ()

    def environment(self, name: str, task: Task) -> dict[str, str]:
        """The variables by which a worker on that host takes the interface that the others reach."""
        return found_interface_variables(self.interface(name), inherited(), task.env)

    def start(
        self,
        name: str,
        task: Task,
        topology: Topology,
        env: Mapping[str, str | None],
        on_change: Callable[[], None],
        *,
        on_line: OnLine,
        on_event: OnEvent = ignore_event,
    ) -> Worker:
        """Start a worker on the host ``name``.

        Raises:
            OSError: the program cannot be started (on this host; elsewhere the worker's outcome says so).
        """
        entry = self._hosts[name]
        env = {**self.environment(name, task), **env}
        if entry.remote is None:
            return start_worker(task, topology, env, on_change, on_line=on_line, on_event=on_event)
        # What the agent's bootstrap has told goes over no connection that is only signed.
        told = self._exported.items()
        task = replace(task, env=dict(pair for pair in task.env.items() if pair not in told))
        return entry.remote.start(next(self._keys), task, topology, env, on_change, on_line=on_line, on_event=on_event)

    def close(self) -> None:
        """Let go of all hosts; nothing of the job is left on them."""
        self._stack.close()

    def _add_local(self, host: Host) -> None:
        port = self._stack.enter_context(ReservedPort(ANY if self._agent_hub is not None else LOOPBACK))
        self._hosts[host.name] = _FleetHost(host, host_key(), outward_interfaces(), port.port, LOOPBACK, LOOPBACK)

    def _connect_remotes(self, hosts: Sequence[Host], *, patient: bool) -> None:
        assert self._agent_hub is not None
        self._agent_hub.connect(hosts, patient=patient)
        for host in hosts:
            self.add_remote(self._agent_hub.remotes[host.name])

    def add_remote(self, remote: RemoteHost) -> None:
        """A host whose agent has called back is one of the fleet."""
        handshake = remote.handshake
        assert handshake is not None
        self._hosts[remote.host.name] = _FleetHost(
            remote.host,
            handshake.host_key,
            handshake.interfaces,
            handshake.master_port,
            remote.launcher_address,
            handshake.address,
            remote=remote,
        )

    def probe(self) -> dict[str, str]:
        """Find for each machine the address at which the others reach it.

        Returns:
            For each host that has none, who reached it where.
        """
        living = [entry for entry in self._hosts.values() if entry.remote is None or not entry.remote.gone]
        lost = self._find_addresses(living)
        for entry in living:
            entry.is_probed = True
        return lost

    def _find_addresses(self, living: Sequence[_FleetHost]) -> dict[str, str]:
        machines = {entry.host_key: entry for entry in reversed(living)}
        if len(machines) <= 1:
            return {}
        lacking: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            claims: list[reachability.HostAddresses] = []
            for entry in machines.values():
                wanted = named(dict(entry.interfaces), self._wanted)
                if self._wanted and not wanted:
                    name, there = (
                        entry.host.name,
                        ", ".join(entry.interfaces) or "none with an IPv4 address, which is needed",
                    )
                    lacking[name] = f"{name} has none of the interfaces {', '.join(self._wanted)}; it has {there}"
                    continue
                # The way to the launcher is the likeliest way to everybody.
                addresses = [a for a in (entry.address,) if a in wanted.values()]
                addresses += [a for a in wanted.values() if a != entry.address]
                if entry.remote is None:
                    probe_listener = reachability.listen_for_probes(self.secret, entry.host.name, addresses or [ANY])
                    stack.callback(probe_listener.close)
                    port = probe_listener.port
                else:
                    assert entry.remote.handshake is not None
                    port = entry.remote.handshake.probe_port
                claims.append(reachability.HostAddresses(entry.host.name, tuple(addresses), port))
            reached = self._reached(claims, [entry for entry in machines.values() if entry.host.name not in lacking])
            if self._given_up.is_set():
                return {}
            known = {entry.host.name for entry in living if entry.is_probed}
            chosen, lost = reachability.choose_addresses(claims, reached, known)
        for entry in living:
            address = chosen.get(machines[entry.host_key].host.name)
            names = {address: name for name, address in entry.interfaces.items()}
            if address is not None and entry.interface != names[address]:
                entry.address, entry.interface = address, names[address]
                logger.info("%s is reached at %s (%s)", entry.host.name, entry.address, entry.interface)
        return {**lacking, **lost}

    def _reached(
        self, claims: Sequence[reachability.HostAddresses], sites: Sequence[_FleetHost]
    ) -> dict[str, Mapping[str, tuple[str, ...]]]:
        names = [claim.name for claim in claims]
        reached: dict[str, Mapping[str, tuple[str, ...]]] = {}

        def ask(entry: _FleetHost) -> None:
            mine = tuple(claim for claim in claims if entry.host.name in reachability.probers(names, claim.name))
            there = entry.remote
            answer = reachability.probe(mine, self.secret) if there is None else there.call(mine, _PROBE_TIMEOUT_S)
            reached[entry.host.name] = answer

        threads = [threading.Thread(target=ask, args=(entry,), name="hvd-probe", daemon=True) for entry in sites]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not self._given_up.is_set():
                thread.join(_GIVE_UP_POLL_S)
        return reached
