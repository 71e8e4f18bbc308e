"""A fleet whose hosts have agents: connected, probed, and ready to start workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch import reachability
from hvd_cluster.launch.environment import found_interface_variables
from hvd_cluster.launch.fleet import Fleet
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.placement import Placement
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.task import Task
from hvd_cluster.rendezvous.addresses import named
from hvd_cluster.rendezvous.sockets import ANY, LOOPBACK
from hvd_cluster.topology import Topology, inherited_env, join_address

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 30.0
#: Seconds between two checks whether to stop waiting.
_GIVE_UP_POLL_S = 0.2


@dataclass
class FleetHost:
    """A connected host."""

    host: Host
    host_key: str
    interfaces: Mapping[str, str]
    master_port: int
    #: The address at which its workers reach the key-value store.
    rendezvous: str
    #: The address at which the other hosts reach it.
    address: str
    #: The interface of that address, if there are other hosts.
    interface: str = ""
    #: The connection to its agent; None for this host.
    remote: RemoteHost | None = None
    #: Whether this connection has been part of a probe.
    is_probed: bool = False


class AgentFleet(Fleet):
    """This host, if it takes part, and others through their agents."""

    def __init__(self, secret: bytes, interfaces: Sequence[str] = ()) -> None:
        super().__init__(secret)
        self._wanted = list(interfaces)
        self._hosts: dict[str, FleetHost] = {}
        self._given_up = threading.Event()
        self._keys = itertools.count()

    def add_remote(self, remote: RemoteHost) -> None:
        """Add a host whose agent has connected."""
        handshake = remote.handshake
        assert handshake is not None
        self._hosts[remote.host.name] = FleetHost(
            remote.host,
            handshake.host_key,
            handshake.interfaces,
            handshake.master_port,
            remote.launcher_address,
            handshake.address,
            remote=remote,
        )

    def give_up(self) -> None:
        self._given_up.set()

    def unprobed(self) -> set[str]:
        return {name for name, entry in list(self._hosts.items()) if not entry.is_probed}

    def is_lost(self, name: str) -> bool:
        entry = self._hosts.get(name)
        return entry is not None and entry.remote is not None and entry.remote.is_lost

    def host_key(self, name: str) -> str:
        return self._hosts[name].host_key

    def address(self, name: str) -> str:
        return self._hosts[name].address

    def topology(self, placement: Placement, name: str, first: str, job_id: str, generation: int = 0) -> Topology:
        first_entry = self._hosts[first]
        return placement.topology(
            rendezvous=self.rendezvous(name),
            secret=self.secret,
            master=join_address(self._seen_from_elsewhere(first_entry, first_entry.address), first_entry.master_port),
            job_id=job_id,
            generation=generation,
        )

    def rendezvous(self, name: str) -> str:
        entry = self._hosts[name]
        address = self._seen_from_elsewhere(entry, entry.rendezvous)
        try:
            return join_address(address, self.server.port_at(address))
        except OSError as error:
            raise LaunchError(f"the launcher cannot open a port at {address}: {error}") from error

    def _seen_from_elsewhere(self, entry: FleetHost, address: str) -> str:
        """``address``, or one that other hosts reach if it is this host's loopback.

        Only if there are other hosts by now.
        """
        if entry.remote is not None or address != LOOPBACK or entry.interface:
            return address
        remotes = [host.remote for host in list(self._hosts.values()) if host.remote is not None]
        return next((remote.launcher_address for remote in remotes if remote.launcher_address), address)

    def interface(self, name: str) -> str:
        return self._hosts[name].interface

    def environment(self, name: str, task: Task) -> dict[str, str]:
        """The variables by which a worker uses the interface that the others reach."""
        return found_interface_variables(self.interface(name), inherited_env(), task.env)

    def probe(self) -> dict[str, str]:
        living = [entry for entry in list(self._hosts.values()) if entry.remote is None or not entry.remote.gone]
        lost = self._find_addresses(living)
        for entry in living:
            entry.is_probed = True
        return lost

    def _find_addresses(self, living: Sequence[FleetHost]) -> dict[str, str]:
        machines = {entry.host_key: entry for entry in reversed(living)}
        if len(machines) <= 1:
            return {}
        lacking: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            candidates: list[reachability.HostAddresses] = []
            for entry in machines.values():
                wanted = named(dict(entry.interfaces), self._wanted)
                if self._wanted and not wanted:
                    name = entry.host.name
                    there = ", ".join(entry.interfaces) or "none with an address"
                    lacking[name] = f"{name} has none of the interfaces {', '.join(self._wanted)}; it has {there}"
                    continue
                # The address on the route to the launcher is most likely reached by the others too.
                addresses = [a for a in (entry.address,) if a in wanted.values()]
                addresses += [a for a in wanted.values() if a != entry.address]
                if entry.remote is None:
                    probe_listener = reachability.listen_for_probes(self.secret, entry.host.name, addresses or [ANY])
                    stack.callback(probe_listener.close)
                    port = probe_listener.port
                else:
                    assert entry.remote.handshake is not None
                    port = entry.remote.handshake.probe_port
                candidates.append(reachability.HostAddresses(entry.host.name, tuple(addresses), port))
            reached = self._reached(
                candidates, [entry for entry in machines.values() if entry.host.name not in lacking]
            )
            if self._given_up.is_set():
                return {}
            known = {entry.host.name for entry in living if entry.is_probed}
            chosen, lost = reachability.choose_addresses(candidates, reached, known)
        for entry in living:
            address = chosen.get(machines[entry.host_key].host.name)
            names = {address: name for name, address in entry.interfaces.items()}
            if address is not None and entry.interface != names[address]:
                entry.address, entry.interface = address, names[address]
                logger.info("%s is reached at %s (%s)", entry.host.name, entry.address, entry.interface)
        return {**lacking, **lost}

    def _reached(
        self, candidates: Sequence[reachability.HostAddresses], sites: Sequence[FleetHost]
    ) -> dict[str, Mapping[str, tuple[str, ...]]]:
        names = [candidate.name for candidate in candidates]
        reached: dict[str, Mapping[str, tuple[str, ...]]] = {}

        def ask(entry: FleetHost) -> None:
            mine = tuple(
                candidate for candidate in candidates if entry.host.name in reachability.probers(names, candidate.name)
            )
            there = entry.remote
            answer = reachability.probe(mine, self.secret) if there is None else there.probe(mine, _PROBE_TIMEOUT_S)
            reached[entry.host.name] = answer

        threads = [threading.Thread(target=ask, args=(entry,), name="hvd-probe", daemon=True) for entry in sites]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not self._given_up.is_set():
                thread.join(_GIVE_UP_POLL_S)
        return reached
