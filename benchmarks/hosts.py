"""Hosts that are none: network namespaces on one machine, with their own /dev/shm and a slow link between them.

Each host is a process that holds a network, a mount and a UTS namespace; they have no names, so nothing is left when it
ends. The hosts hang on a switch (a bridge in one more namespace), each by a veth pair, and both of its ends limit
the bits per second (``tc tbf``). Only root may make them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hvd_cluster.launch import die_with_parent
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.logs import printer
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.launch.worker_group import Callbacks, WorkerGroup
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import ReservedPort
from hvd_cluster.topology import join_address

T = TypeVar("T")

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
_CLONE_NEWNET = 0x40000000
_START_TIMEOUT_S = 60.0


def missing() -> str:
    """What stands in the way of making hosts here; empty where nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"these programs are not installed: {', '.join(absent)} (Debian: iproute2, util-linux, mount, hostname)"
    tried = subprocess.run(
        ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_tbf(1000)],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"tc tbf does not work in a network namespace here: {tried.stderr.strip()}" if tried.returncode else ""


def _tbf(rate_mbit: float) -> list[str]:
    """The bucket holds what passes in a few milliseconds: smaller ones starve a fast link, larger ones hide it."""
    burst_bytes = max(64 << 10, int(rate_mbit * 1e6 / 8 * 0.002))
    return ["rate", f"{rate_mbit}mbit", "burst", str(burst_bytes), "latency", "50ms"]


class Hosts:
    """``num_hosts`` hosts that see each other and nothing else. A context manager.

    Args:
        num_hosts: how many; host ``i`` has the address ``10.77.0.<i + 1>`` and the name ``host<i>``.
        rate_mbit: what each host sends and receives per second, in million bits; None for no limit.

    Raises:
        OSError: :func:`missing` says why.
    """

    def __init__(self, num_hosts: int = 2, rate_mbit: float | None = 1000.0) -> None:
        if reason := missing():
            raise OSError(reason)
        self.addresses = [f"10.77.0.{index + 1}" for index in range(num_hosts)]
        self._rate_mbit = rate_mbit
        self._holders: list[subprocess.Popen[bytes]] = []
        self._scripts: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd-hosts-"))
            self._holders = [stack.enter_context(_holder(f"host{i}")) for i in range(len(self.addresses))]
            switch = stack.enter_context(_holder("switch"))
            _inside(switch.pid, "ip link add br0 type bridge && ip link set br0 up")
            for index, (holder, address) in enumerate(zip(self._holders, self.addresses, strict=True)):
                _inside(
                    switch.pid,
                    f"ip link add port{index} type veth peer name eth0 netns {holder.pid} && "
                    f"ip link set port{index} master br0 up",
                )
                _inside(
                    holder.pid,
                    "mount -t tmpfs -o size=4g tmpfs /dev/shm && ip link set lo up && "
                    f"ip address add {address}/24 dev eth0 && ip link set eth0 up",
                )
                if self._rate_mbit is not None:
                    limit = " ".join(_tbf(self._rate_mbit))
                    _inside(holder.pid, f"tc qdisc add dev eth0 root tbf {limit}")
                    _inside(switch.pid, f"tc qdisc add dev port{index} root tbf {limit}")
                script = Path(folder, f"python-host{index}")
                script.write_text(f'#!/bin/sh\nexec {" ".join(_enter(holder.pid))} {sys.executable} "$@"\n')
                script.chmod(0o755)
                self._scripts.append(str(script))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def shell(self, host: int, command: str) -> str:
        """The output of a shell command on ``host``; raises ``CalledProcessError`` where it fails."""
        return _inside(self._holders[host].pid, command)

    def python(self, host: int) -> str:
        """A program that runs this Python on ``host``."""
        return self._scripts[host]

    def enter(self, host: int) -> list[str]:
        """The words in front of a command that runs on ``host``."""
        return _enter(self._holders[host].pid)

    def call(self, host: int, function: Callable[[], T]) -> T:
        """``function()`` in a thread of this process that is on ``host``: its sockets are made there and stay there."""

        def enter() -> T:
            with Path(f"/proc/{self._holders[host].pid}/ns/net").open() as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            return function()

        with ThreadPoolExecutor(1, thread_name_prefix=f"on-host{host}") as thread:
            return thread.submit(enter).result()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        ranks: Sequence[int],
        env: Mapping[str, str | None] | None = None,
        verbose: int = 1,
    ) -> list[Any]:
        """Run ``fn(*args)`` in one world over the hosts, as :func:`hvd_cluster.launch.local.run` does on one.

        Args:
            fn: what to run; :func:`~hvd_cluster.launch.local.run` says what is possible.
            args: its arguments.
            ranks: number of ranks on each host.
            env: variables on top of this process's environment.
            verbose: 0 drops the workers' output.

        Returns:
            What ``fn`` returned, by rank.

        Raises:
            WorkerFailedError: a worker failed.
        """
        homes = [host for host, count in enumerate(ranks) for _ in range(count)]
        slots = [Slot(index, f"host{host}", self.addresses[host]) for index, host in enumerate(homes)]
        secret, job_id, first = new_secret(), uuid.uuid4().hex[:12], self.addresses[homes[0]]
        call = pack(fn, args, None)
        # What a module of the repository defines travels by name.
        variables = {"PYTHONPATH": os.pathsep.join([path for path in sys.path if path]), **(env or {})}
        server = self.call(homes[0], lambda: KeyValueServer(secret, first))
        with server, self.call(homes[0], lambda: ReservedPort(first)) as master:
            group = WorkerGroup[WorkerProcess]()
            topologies = [
                placement.topology(
                    rendezvous=join_address(first, server.port),
                    secret=secret,
                    master=join_address(first, master.port),
                    job_id=job_id,
                )
                for placement in place(slots)
            ]
            on_line = printer(None, None, with_timestamp=False, verbose=verbose)
            try:
                starters = [
                    functools.partial(WorkerProcess, topology, call, env=variables, executable=self._scripts[home])
                    for topology, home in zip(topologies, homes, strict=True)
                ]
                group.start(starters, Callbacks(on_line=on_line))
                group.wait_ready(_START_TIMEOUT_S)
                outcomes = group.ends()
            finally:
                group.stop()
        return collect(outcomes)


@contextmanager
def _holder(name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with namespaces of its own; it ends with this one, and they with it."""
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", f"hostname {name} && echo && exec sleep infinity"]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(die_with_parent.__file__)), str(os.getpid()), *command],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"\n":
            raise OSError(f"no namespaces for {name}: unshare ended with code {process.wait()}")
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", f"--wdns={Path.cwd()}", "--"]


def _inside(pid: int, command: str) -> str:
    done = subprocess.run([*_enter(pid), "sh", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command!r} failed in a namespace: {done.stderr.strip()}")
    return done.stdout
