"""The hosts of a job, this one and others, reached through ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch import reachability
from hvd_cluster.launch.agent_fleet import AgentFleet, FleetHost
from hvd_cluster.launch.environment import exportable
from hvd_cluster.launch.hosts import Host, is_local
from hvd_cluster.launch.spec import JobSpec
from hvd_cluster.launch.ssh.agent_hub import AgentHub
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task, start_worker
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.rendezvous.addresses import host_key, outward_interfaces
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import ANY, LOOPBACK, ReservedPort
from hvd_cluster.topology import Topology, inherited_env


class SshFleet(AgentFleet):
    """This host, and others on which ssh starts an agent."""

    def __init__(
        self,
        secret: bytes,
        options: SshOptions | None = None,
        interfaces: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(secret, interfaces)
        self._options = options or SshOptions()
        self._exported: dict[str, str | None] = {**exportable(inherited_env()), **(env or {})}
        self._agent_hub: AgentHub | None = None

    @classmethod
    def of(cls, spec: JobSpec) -> SshFleet:
        """The fleet of a job, with a secret of its own."""
        return cls(new_secret(), spec.ssh, spec.interfaces, env=spec.task.env)

    def connect(self, hosts: Sequence[Host]) -> None:
        local = {host.name for host in hosts if is_local(host.name)}
        others = [host for host in hosts if host.name not in local]
        self._open(others=bool(others), takes_part=bool(local))
        for host in hosts:
            if host.name in local:
                self._add_local(host)
        if others:
            self._connect_remotes(others, retry=True)
            if lost := self.probe():
                raise reachability.unreachable(lost)
            assert self._agent_hub is not None
            self._agent_hub.complete()
        self._hosts = {host.name: self._hosts[host.name] for host in hosts}

    def open(self, *, others: bool) -> None:
        if self._server is None:
            self._open(others=others, takes_part=False)

    def _open(self, *, others: bool, takes_part: bool) -> None:
        try:
            # Workers on other hosts use the address at which their agent reached the launcher; see rendezvous().
            self._server = self._stack.enter_context(KeyValueServer(self.secret, LOOPBACK))
            if others:
                self._agent_hub = AgentHub(
                    self.secret, self._options, self._wanted, takes_part=takes_part, env=self._exported
                )
                self._stack.callback(self._agent_hub.close)
        except OSError as error:
            raise LaunchError(f"the launcher cannot open a port: {error}") from error

    def add(self, host: Host) -> str:
        if host.name in self._hosts:
            entry = self._hosts[host.name]
            if entry.remote is None or not entry.remote.gone:
                entry.host = host
                return ""
            # Keep its entry until it is reached again: its last workers may not be reaped yet.
            if self._agent_hub is not None:
                self._agent_hub.drop(host.name)
        try:
            if is_local(host.name):
                self._add_local(host)
            else:
                self._connect_remotes([host], retry=False)
        except LaunchError as error:
            return str(error)
        return ""

    def give_up(self) -> None:
        super().give_up()
        if self._agent_hub is not None:
            self._agent_hub.give_up()

    def start(
        self, name: str, task: Task, topology: Topology, env: Mapping[str, str | None], callbacks: Callbacks
    ) -> Worker:
        entry = self._hosts[name]
        env = {**self.environment(name, task), **env}
        if entry.remote is None:
            return start_worker(task, topology, env, callbacks)
        # Variables of the bootstrap message must not go over a connection that is authenticated but not encrypted.
        exported = self._exported.items()
        task = replace(task, env=dict(pair for pair in task.env.items() if pair not in exported))
        return entry.remote.start(next(self._keys), task, topology, env, callbacks)

    def _add_local(self, host: Host) -> None:
        port = self._stack.enter_context(ReservedPort(ANY if self._agent_hub is not None else LOOPBACK))
        self._hosts[host.name] = FleetHost(host, host_key(), outward_interfaces(), port.port, LOOPBACK, LOOPBACK)

    def _connect_remotes(self, hosts: Sequence[Host], *, retry: bool) -> None:
        assert self._agent_hub is not None
        self._agent_hub.connect(hosts, retry=retry)
        for host in hosts:
            self.add_remote(self._agent_hub.remotes[host.name])
