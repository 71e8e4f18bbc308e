"""The hosts of a job, this one and others: connected, reachable for each other, and ready to start workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch import reach
from hvd_cluster.launch.environment import exportable, found_interface_variables
from hvd_cluster.launch.group import Worker
from hvd_cluster.launch.hosts import LOOPBACK, Host, is_local
from hvd_cluster.launch.interfaces import named, outward_interfaces
from hvd_cluster.launch.logs import OnLine
from hvd_cluster.launch.placement import Placement, Seat
from hvd_cluster.launch.ports import ReservedPort
from hvd_cluster.launch.process import OnEvent, ignore_event
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.ssh import Ssh
from hvd_cluster.launch.switchboard import Switchboard
from hvd_cluster.launch.task import Task, start_worker
from hvd_cluster.rendezvous.listening import ANY
from hvd_cluster.rendezvous.reach import host_key
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology, inherited, join_address

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 30.0
#: Seconds between two looks whether to go on waiting.
_GIVE_UP_LOOK_S = 0.2


@dataclass
class _Site:
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
        options: Ssh | None = None,
        interfaces: Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.secret = secret
        self._options = options or Ssh()
        self._wanted = list(interfaces)
        self._on_change = on_change
        self._exported: dict[str, str | None] = {**exportable(inherited()), **(env or {})}
        self._switchboard: Switchboard | None = None
        self._sites: dict[str, _Site] = {}
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
                raise reach.unreachable(lost)
            assert self._switchboard is not None
            self._switchboard.complete()
        self._sites = {host.name: self._sites[host.name] for host in hosts}

    def open(self, *, others: bool) -> None:
        """Start the rendezvous, and the door for agents where there may be other hosts."""
        if self._server is None:
            self._open(others=others, takes_part=False)

    def _open(self, *, others: bool, takes_part: bool) -> None:
        try:
            # Other hosts' workers find it at the address by which their agent came; see rendezvous().
            self._server = self._stack.enter_context(KeyValueServer(self.secret, LOOPBACK))
            if others:
                self._switchboard = Switchboard(
                    self.secret,
                    self._options,
                    self._wanted,
                    self._on_change,
                    takes_part=takes_part,
                    env=self._exported,
                )
                self._stack.callback(self._switchboard.close)
        except OSError as error:
            raise LaunchError(f"the launcher cannot open a port: {error}") from error

    def add(self, host: Host) -> str:
        """Reach one more host of a job that runs. Returns why it cannot be used, or an empty string."""
        if host.name in self._sites:
            site = self._sites[host.name]
            if site.remote is None or not site.remote.gone:
                site.host = host
                return ""
            # Until it is reached again, what is known of it stays: its last workers may not be reaped yet.
            if self._switchboard is not None:
                self._switchboard.drop(host.name)
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
        if self._switchboard is not None:
            self._switchboard.give_up()

    def unprobed(self) -> set[str]:
        """Hosts that were connected, for the first time or again, since the last :meth:`probe`."""
        return {name for name, site in list(self._sites.items()) if not site.is_probed}

    def is_lost(self, name: str) -> bool:
        """Whether that host has gone, and how its workers ended is known; it may be in the course of coming back."""
        site = self._sites.get(name)
        return site is not None and site.remote is not None and site.remote.is_over

    def host_key(self, name: str) -> str:
        """Equal for two names that mean the same machine."""
        return self._sites[name].host_key

    def seats(self, hosts: Sequence[Host]) -> list[Seat]:
        """A seat for each slot of ``hosts``, which must be connected, in their order."""
        slots = [self._sites[host.name] for host in hosts for _ in range(host.slots)]
        return [Seat(index, site.host_key, site.address) for index, site in enumerate(slots)]

    def names(self, hosts: Sequence[Host]) -> list[str]:
        """The name of the host of each of :meth:`seats`."""
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
        chief = self._sites[first]
        return placement.topology(
            rendezvous=self.rendezvous(name),
            secret=self.secret,
            master=join_address(self._seen_from_elsewhere(chief, chief.address), chief.master_port),
            job_id=job_id,
            generation=generation,
        )

    def rendezvous(self, name: str) -> str:
        """Where workers of that host find the job's store."""
        site = self._sites[name]
        address = self._seen_from_elsewhere(site, site.rendezvous)
        try:
            return join_address(address, self.server.port_at(address))
        except OSError as error:
            raise LaunchError(f"the launcher cannot open a port at {address}: {error}") from error

    def _seen_from_elsewhere(self, site: _Site, address: str) -> str:
        """``address``, unless it is this host's loopback and there are other hosts by now."""
        if site.remote is not None or address != LOOPBACK or site.interface:
            return address
        remotes = self._switchboard.remotes.values() if self._switchboard is not None else ()
        return next((remote.launcher_address for remote in remotes if remote.launcher_address), address)

    def interface(self, name: str) -> str:
        """The interface by which the others reach that host; empty where there are no others."""
        return self._sites[name].interface

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
        site = self._sites[name]
        env = {**self.environment(name, task), **env}
        if site.remote is None:
            return start_worker(task, topology, env, on_change, on_line=on_line, on_event=on_event)
        # What the agent's greeting has told goes over no connection that is only signed.
        told = self._exported.items()
        task = replace(task, env=dict(pair for pair in task.env.items() if pair not in told))
        return site.remote.start(next(self._keys), task, topology, env, on_change, on_line=on_line, on_event=on_event)

    def close(self) -> None:
        """Let go of all hosts; nothing of the job is left on them."""
        self._stack.close()

    def _add_local(self, host: Host) -> None:
        port = self._stack.enter_context(ReservedPort(ANY if self._switchboard is not None else LOOPBACK))
        self._sites[host.name] = _Site(host, host_key(), outward_interfaces(), port.port, LOOPBACK, LOOPBACK)

    def _connect_remotes(self, hosts: Sequence[Host], *, patient: bool) -> None:
        assert self._switchboard is not None
        self._switchboard.connect(hosts, patient=patient)
        for host in hosts:
            self.take_in(self._switchboard.remotes[host.name])

    def take_in(self, remote: RemoteHost) -> None:
        """A host whose agent has called back is one of the fleet."""
        hello = remote.hello
        assert hello is not None
        self._sites[remote.host.name] = _Site(
            remote.host,
            hello.host_key,
            hello.interfaces,
            hello.master_port,
            remote.launcher_address,
            hello.address,
            remote=remote,
        )

    def probe(self) -> dict[str, str]:
        """Find for each machine the address at which the others reach it.

        Returns:
            For each host that has none, who reached it where.
        """
        living = [site for site in self._sites.values() if site.remote is None or not site.remote.gone]
        lost = self._find_addresses(living)
        for site in living:
            site.is_probed = True
        return lost

    def _find_addresses(self, living: Sequence[_Site]) -> dict[str, str]:
        machines = {site.host_key: site for site in reversed(living)}
        if len(machines) <= 1:
            return {}
        lacking: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            claims: list[reach.Claim] = []
            for site in machines.values():
                wanted = named(dict(site.interfaces), self._wanted)
                if self._wanted and not wanted:
                    name, there = (
                        site.host.name,
                        ", ".join(site.interfaces) or "none with an IPv4 address, which is needed",
                    )
                    lacking[name] = f"{name} has none of the interfaces {', '.join(self._wanted)}; it has {there}"
                    continue
                # The way to the launcher is the likeliest way to everybody.
                addresses = [a for a in (site.address,) if a in wanted.values()]
                addresses += [a for a in wanted.values() if a != site.address]
                if site.remote is None:
                    beacon = reach.Beacon(self.secret, site.host.name, addresses or [ANY])
                    stack.callback(beacon.close)
                    port = beacon.port
                else:
                    assert site.remote.hello is not None
                    port = site.remote.hello.beacon_port
                claims.append(reach.Claim(site.host.name, tuple(addresses), port))
            reached = self._reached(claims, [site for site in machines.values() if site.host.name not in lacking])
            if self._given_up.is_set():
                return {}
            known = {site.host.name for site in living if site.is_probed}
            chosen, lost = reach.choose(claims, reached, known)
        for site in living:
            address = chosen.get(machines[site.host_key].host.name)
            names = {address: name for name, address in site.interfaces.items()}
            if address is not None and site.interface != names[address]:
                site.address, site.interface = address, names[address]
                logger.info("%s is reached at %s (%s)", site.host.name, site.address, site.interface)
        return {**lacking, **lost}

    def _reached(
        self, claims: Sequence[reach.Claim], sites: Sequence[_Site]
    ) -> dict[str, Mapping[str, tuple[str, ...]]]:
        names = [claim.name for claim in claims]
        reached: dict[str, Mapping[str, tuple[str, ...]]] = {}

        def ask(site: _Site) -> None:
            mine = tuple(claim for claim in claims if site.host.name in reach.witnesses(names, claim.name))
            there = site.remote
            answer = reach.call(mine, self.secret) if there is None else there.call(mine, _PROBE_TIMEOUT_S)
            reached[site.host.name] = answer

        threads = [threading.Thread(target=ask, args=(site,), name="hvd-probe", daemon=True) for site in sites]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not self._given_up.is_set():
                thread.join(_GIVE_UP_LOOK_S)
        return reached
