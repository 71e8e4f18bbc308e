"""The hosts of a job, this one and others: connected, reachable for each other, and ready to start workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_cluster.errors import AuthenticationError, LaunchError
from hvd_cluster.launch import reach
from hvd_cluster.launch.agent_message import Hello
from hvd_cluster.launch.environment import exportable
from hvd_cluster.launch.greeting import Greeting
from hvd_cluster.launch.group import Worker
from hvd_cluster.launch.hosts import LOOPBACK, Host, is_local
from hvd_cluster.launch.interfaces import interface_addresses, named
from hvd_cluster.launch.logs import OnLine
from hvd_cluster.launch.machine import machine_key, notice_vanishing
from hvd_cluster.launch.placement import Placement, Seat
from hvd_cluster.launch.ports import ReservedPort
from hvd_cluster.launch.process import OnEvent, ignore_event
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.ssh import Ssh
from hvd_cluster.launch.task import Task, start_worker
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology, inherited, join_address

logger = logging.getLogger(__name__)

_CALL_BACK_TIMEOUT_S = 10.0
_END_GRACE_S = 8.0
_TRY_AGAIN_S = 1.0
#: Connections that may prove themselves at the same time; a burst of agents does so at once.
_MOST_STRANGERS = 256
_PROBE_TIMEOUT_S = 30.0


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


class Fleet:
    """A context manager over the connections to the hosts of one job, and its rendezvous.

    Args:
        secret: the job's secret.
        options: how ssh is called.
        interfaces: names, or beginnings of names, of the network interfaces to use; none leaves the choice to a probe.
        on_change: called, from another thread, when a host has gone.
    """

    def __init__(
        self,
        secret: bytes,
        options: Ssh | None = None,
        interfaces: Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.secret = secret
        self._options = options or Ssh()
        self._wanted = list(interfaces)
        self._on_change = on_change
        self._sites: dict[str, _Site] = {}
        self._remotes: dict[str, RemoteHost] = {}
        self._keys = itertools.count()
        self._changed = threading.Condition()
        self._stack = contextlib.ExitStack()
        self._server: KeyValueServer | None = None
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._strangers = threading.Semaphore(_MOST_STRANGERS)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def server(self) -> KeyValueServer:
        """The job's rendezvous; there is none before :meth:`connect`."""
        assert self._server is not None
        return self._server

    def connect(self, hosts: Sequence[Host], *, open_to_others: bool | None = None) -> None:
        """Reach all ``hosts``, and let them find out how they reach each other.

        Args:
            hosts: those of the job.
            open_to_others: let the rendezvous be reached from other hosts; by default where there are some.

        Raises:
            LaunchError: a host cannot be reached through ssh, or not from the others; all such hosts are named.
        """
        local = {host.name for host in hosts if is_local(host.name)}
        others = [host for host in hosts if host.name not in local]
        self.open(others=bool(others) if open_to_others is None else open_to_others)
        for host in hosts:
            if host.name in local:
                self._add_local(host)
        if others:
            self._connect_remotes(others, patient=True)
            if lost := self.probe():
                raise reach.unreachable(lost)
        self._sites = {host.name: self._sites[host.name] for host in hosts}

    def open(self, *, others: bool) -> None:
        """Start the rendezvous, and the door for agents where there may be other hosts."""
        if self._server is not None:
            return
        try:
            self._server = self._stack.enter_context(KeyValueServer(self.secret, "0.0.0.0" if others else LOOPBACK))
            if others:
                self._listener = socket.create_server(("0.0.0.0", 0), backlog=512)
        except OSError as error:
            raise LaunchError(f"the launcher cannot open a port: {error}") from error
        if self._listener is not None:
            thread = threading.Thread(target=self._accept, args=(self._listener,), name="hvd-agents", daemon=True)
            thread.start()
            self._threads.append(thread)

    def add(self, host: Host) -> str:
        """Reach one more host of a job that runs. Returns why it cannot be used, or an empty string."""
        if host.name in self._sites:
            site = self._sites[host.name]
            if site.remote is None or not site.remote.gone:
                site.host = host
                return ""
            self.drop(host.name)
        try:
            if is_local(host.name):
                self._add_local(host)
            else:
                self._connect_remotes([host], patient=False)
        except LaunchError as error:
            return str(error)
        return ""

    def drop(self, name: str) -> None:
        """Let go of a host; what runs there is ended."""
        self._sites.pop(name, None)
        remote = self._remotes.pop(name, None)
        if remote is not None:
            remote.let_end()
            remote.close(time.monotonic() + 1.0)

    def gone(self, name: str) -> str:
        """Why a host can no longer be used; empty while it can."""
        site = self._sites.get(name)
        return "it is not connected" if site is None else site.remote.gone if site.remote is not None else ""

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
        return join_address(self._seen_from_elsewhere(site, site.rendezvous), self.server.port)

    def _seen_from_elsewhere(self, site: _Site, address: str) -> str:
        """``address``, unless it is this host's loopback and there are other hosts by now."""
        if site.remote is None and address == LOOPBACK and not site.interface:
            return next((r.launcher_address for r in self._remotes.values() if r.launcher_address), address)
        return address

    def interface(self, name: str) -> str:
        """The interface by which the others reach that host; empty where there are no others."""
        return self._sites[name].interface

    def environment(self, name: str) -> dict[str, str | None]:
        """The variables by which a worker on that host takes the interface that the others reach."""
        interface = self.interface(name)
        return {"HOROVOD_GLOO_IFACE": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}

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
        env = {**self.environment(name), **env}
        if site.remote is None:
            return start_worker(task, topology, env, on_change, on_line=on_line, on_event=on_event)
        task = replace(task, env={**exportable(inherited()), **task.env})
        return site.remote.start(next(self._keys), task, topology, env, on_change, on_line=on_line, on_event=on_event)

    def close(self) -> None:
        """Let go of all hosts; nothing of the job is left on them."""
        remotes = list(self._remotes.values())
        for remote in remotes:
            remote.let_end()
        deadline_s = time.monotonic() + _END_GRACE_S
        for remote in remotes:
            remote.close(deadline_s)
        self._remotes.clear()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            self._listener.close()
        for thread in self._threads:
            thread.join(_CALL_BACK_TIMEOUT_S)
        self._stack.close()

    def _add_local(self, host: Host) -> None:
        port = self._stack.enter_context(ReservedPort("0.0.0.0" if self._listener is not None else LOOPBACK))
        self._sites[host.name] = _Site(host, machine_key(), interface_addresses(), port.port, LOOPBACK, LOOPBACK)

    def _connect_remotes(self, hosts: Sequence[Host], *, patient: bool) -> None:
        """Start the agents of other hosts.

        Args:
            hosts: theirs.
            patient: try again where a host is not up yet, as long as there is time.
        """
        timeout_s = self._options.connect_timeout_s
        deadline_s = time.monotonic() + timeout_s
        greeting = self._greeting()
        for host in hosts:
            logger.info("connecting to %s", host.name)
            self._call_agent(host, greeting)
        names = [host.name for host in hosts]

        def late() -> list[RemoteHost]:
            """Hosts that are gone but may yet come."""
            return [r for name in names if (r := self._remotes[name]).may_come] if patient else []

        def settled() -> bool:
            return bool(late()) or all(self._remotes[name].hello or self._remotes[name].gone for name in names)

        told: set[str] = set()
        while True:
            with self._changed:
                # A little more than ssh has, so that ssh gets to say what is wrong.
                self._changed.wait_for(settled, max(0.0, deadline_s + 2 - time.monotonic()))
            again = late()
            if not again or time.monotonic() + _TRY_AGAIN_S >= deadline_s:
                break
            for remote in again:
                if remote.host.name not in told:
                    told.add(remote.host.name)
                    logger.warning("%s\nTrying again for %.0f s.", remote.gone, deadline_s - time.monotonic())
            time.sleep(_TRY_AGAIN_S)
            for remote in again:
                remote.close(0.0)
                self._call_agent(remote.host, greeting)
        remotes = [self._remotes[name] for name in names]
        wrong = [
            remote.gone
            or f"{remote.host.name}: no answer within {timeout_s:g} s; --start-timeout sets how long to wait"
            for remote in remotes
            if remote.hello is None or remote.gone
        ]
        if wrong:
            for remote in remotes:
                self.drop(remote.host.name)
            raise LaunchError("could not connect to some hosts via ssh:\n  " + "\n  ".join(wrong))
        for remote in remotes:
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

    def _greeting(self) -> Greeting:
        assert self._listener is not None
        own = interface_addresses()
        return Greeting(
            name="",
            # Those of the wanted interfaces first; this host may have none of them.
            addresses=list(dict.fromkeys([*named(own, self._wanted).values(), *own.values(), LOOPBACK])),
            port=self._listener.getsockname()[1],
            secret=self.secret.hex(),
            cwd=str(Path.cwd()),
            sys_path=sys.path,
        )

    def _call_agent(self, host: Host, greeting: Greeting) -> None:
        try:
            self._remotes[host.name] = RemoteHost(host, replace(greeting, name=host.name), self._options, self._notify)
        except OSError as error:
            raise LaunchError(f"ssh cannot be started: {error}. Install an ssh client on this host.") from error

    def probe(self) -> dict[str, str]:
        """Find for each machine the address at which the others reach it.

        Returns:
            For each host that has none, who reached it where.
        """
        living = [site for site in self._sites.values() if site.remote is None or not site.remote.gone]
        machines = {site.host_key: site for site in reversed(living)}
        if len(machines) <= 1:
            return {}
        with contextlib.ExitStack() as stack:
            claims: list[reach.Claim] = []
            for site in machines.values():
                wanted = named(dict(site.interfaces), self._wanted)
                if self._wanted and not wanted:
                    there = ", ".join(site.interfaces)
                    name = site.host.name
                    return {name: f"{name} has none of the interfaces {', '.join(self._wanted)}; it has {there}"}
                # The way to the launcher is the likeliest way to everybody.
                addresses = [a for a in (site.address,) if a in wanted.values()]
                addresses += [a for a in wanted.values() if a != site.address]
                if site.remote is None:
                    beacon = stack.enter_context(contextlib.closing(reach.Beacon(self.secret, site.host.name)))
                    port = beacon.port
                else:
                    assert site.remote.hello is not None
                    port = site.remote.hello.beacon_port
                claims.append(reach.Claim(site.host.name, tuple(addresses), port))
            reached = self._reached(claims, list(machines.values()))
            chosen, lost = reach.choose(claims, reached)
        for site in living:
            address = chosen.get(machines[site.host_key].host.name)
            names = {address: name for name, address in site.interfaces.items()}
            if address is not None and site.interface != names[address]:
                site.address, site.interface = address, names[address]
                logger.info("%s is reached at %s (%s)", site.host.name, site.address, site.interface)
        return lost

    def _reached(
        self, claims: Sequence[reach.Claim], sites: Sequence[_Site]
    ) -> dict[str, Mapping[str, tuple[str, ...]]]:
        names = [claim.name for claim in claims]
        reached: dict[str, Mapping[str, tuple[str, ...]]] = {}

        def ask(site: _Site) -> None:
            mine = tuple(claim for claim in claims if site.host.name in reach.witnesses(names, claim.name))
            if site.remote is None:
                reached[site.host.name] = reach.call(mine, self.secret)
            else:
                reached[site.host.name] = site.remote.call(mine, _PROBE_TIMEOUT_S)

        threads = [threading.Thread(target=ask, args=(site,), name="hvd-probe", daemon=True) for site in sites]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return reached

    def _accept(self, listener: socket.socket) -> None:
        """Let agents in. Strangers get a thread each until they have failed to prove themselves."""
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                self._strangers.acquire()
                thread = threading.Thread(target=self._welcome, args=(sock,), name="hvd-agent", daemon=True)
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
                thread.start()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            self._let_in(sock)
        finally:
            self._strangers.release()

    def _let_in(self, sock: socket.socket) -> None:
        try:
            notice_vanishing(sock)
            channel = Channel.accept(sock, self.secret, _CALL_BACK_TIMEOUT_S)
            channel.settimeout(_CALL_BACK_TIMEOUT_S)
            hello: Hello = pickle.loads(channel.recv())
            channel.settimeout(None)
        except (OSError, EOFError, AuthenticationError) as error:
            logger.info("a connection that is no agent's was dropped: %s", error)
            sock.close()
            return
        remote = self._remotes.get(hello.name)
        if remote is None or remote.hello is not None:
            channel.close()
        else:
            remote.attach(hello, channel)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._on_change()
