"""Starts agents on other hosts through ssh, and keeps the connections to them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.ssh.host import SshHost
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.wire.agent_messages import STOP_PROBING, AgentHandshake, BootstrapMessage
from hvd_cluster.launch.wire.listener import listen_for_handshakes
from hvd_cluster.rendezvous.addresses import listening_addresses, named, outward_interfaces
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.sockets import ANY, LOOPBACK
from hvd_cluster.version import __version__

logger = logging.getLogger(__name__)

_END_GRACE_S = 8.0
_RETRY_S = 1.0


class AgentHub:
    """Starts agents through ssh and accepts their connections.

    They must prove that they know the secret.

    Args:
        interfaces: names, or prefixes of names, of the network interfaces that the hosts should use.
        takes_part: whether this host runs workers too, so that the others must reach it through those interfaces.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(
        self,
        secret: bytes,
        options: SshOptions,
        interfaces: Sequence[str],
        *,
        takes_part: bool = False,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        #: The other hosts, by the name that the user gave them.
        self.remotes: dict[str, SshHost] = {}
        self._secret = secret
        self._options = options
        self._wanted = list(interfaces)
        self._env = dict(env or {})
        self._changed = threading.Condition()
        self._given_up = False
        self._where = listening_addresses(self._wanted if takes_part else [])
        self._listener = listen_for_handshakes(secret, self._accept, self._where)

    def connect(self, hosts: Sequence[Host], *, retry: bool) -> None:
        """Start the agents of other hosts.

        Args:
            retry: try again, as long as there is time, if a host may still be starting.

        Raises:
            LaunchError: some hosts cannot be reached, or not before :meth:`give_up`. The message names all of them, and
                their connections are closed.
        """
        timeout_s = self._options.connect_timeout_s
        deadline_s = time.monotonic() + timeout_s
        bootstrap = self._bootstrap()
        for host in hosts:
            logger.info("connecting to %s", host.name)
            self._start_agent(host, bootstrap)
        names = [host.name for host in hosts]

        def starting() -> list[SshHost]:
            """Hosts that failed but may still be starting."""
            return (
                [r for name in names if (r := self.remotes[name]).may_be_starting]
                if retry and not self._given_up
                else []
            )

        def settled() -> bool:
            all_known = all(self.remotes[name].handshake or self.remotes[name].gone for name in names)
            return self._given_up or all_known or bool(starting())

        warned: set[str] = set()
        while True:
            with self._changed:
                # A little longer than ssh's own timeout, so that ssh can report its error.
                self._changed.wait_for(settled, max(0.0, deadline_s + 2 - time.monotonic()))
            again = starting()
            if not again or time.monotonic() + _RETRY_S >= deadline_s:
                break
            for remote in again:
                if remote.host.name not in warned:
                    warned.add(remote.host.name)
                    logger.warning("%s\nTrying again for %.0f s.", remote.gone, deadline_s - time.monotonic())
            time.sleep(_RETRY_S)
            for remote in again:
                remote.close(0.0)
                self._start_agent(remote.host, bootstrap)
        remotes = [self.remotes[name] for name in names]
        wrong = [
            remote.gone
            or f"{remote.host.name}: no answer within {timeout_s:g} s; --start-timeout sets how long to wait"
            for remote in remotes
            if remote.handshake is None or remote.gone
        ]
        if wrong:
            for remote in remotes:
                self.drop(remote.host.name)
            raise LaunchError("could not connect to some hosts via ssh:\n  " + "\n  ".join(wrong))

    def give_up(self) -> None:
        """Make :meth:`connect`, in other threads, stop waiting."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def drop(self, name: str) -> None:
        """Close the connection to a host; everything of the job ends there."""
        remote = self.remotes.pop(name, None)
        if remote is not None:
            remote.request_end()
            remote.close(time.monotonic() + 1.0)

    def complete(self) -> None:
        """All hosts are connected: close the listener and the agents' probe listeners."""
        self._listener.close(0.0)
        for remote in self.remotes.values():
            remote.send(STOP_PROBING)

    def close(self) -> None:
        """Close the connections to all hosts; no process of the job remains on them."""
        remotes = list(self.remotes.values())
        for remote in remotes:
            remote.request_end()
        deadline_s = time.monotonic() + _END_GRACE_S
        for remote in remotes:
            remote.close(deadline_s)
        self.remotes.clear()
        self._listener.close()

    def _bootstrap(self) -> BootstrapMessage:
        own = outward_interfaces()
        # Addresses of the wanted interfaces come first; this host may have none of them.
        likely = list(dict.fromkeys([*named(own, self._wanted).values(), *own.values(), LOOPBACK]))
        return BootstrapMessage(
            name="",
            addresses=likely if self._where == [ANY] else self._where,
            port=self._listener.port,
            interfaces=self._wanted,
            secret=self._secret.hex(),
            cwd=str(Path.cwd()),
            sys_path=sys.path,
            env=self._env,
        )

    def _start_agent(self, host: Host, bootstrap: BootstrapMessage) -> None:
        try:
            self.remotes[host.name] = SshHost(host, replace(bootstrap, name=host.name), self._options, self._notify)
        except OSError as error:
            raise LaunchError(f"ssh cannot be started: {error}. Install an ssh client on this host.") from error

    def _accept(self, handshake: AgentHandshake, channel: Channel) -> bool:
        remote = self.remotes.get(handshake.name)
        if remote is None or remote.handshake is not None:
            return False
        if handshake.version != __version__:
            there = handshake.version or "another version"
            remote.refuse(
                f"{handshake.name}: hvd_cluster is {there} there and {__version__} here; "
                "all hosts need the same Python environment"
            )
            return False
        remote.attach(handshake, channel)
        return True

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
