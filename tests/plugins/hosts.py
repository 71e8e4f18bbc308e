"""Hosts for tests: network namespaces of this machine, joined by a bridge, with an sshd in each.

``hosts(2)`` gives machines at 10.77.<net>.1, .2, ... that reach each other and the test's own process (.254) over real
TCP, ``hosts(2, ipv6=True)`` machines at fd77:<net>::1, ... that have no IPv4 address except loopback;
:meth:`Machine.shell` runs something inside one. Each has a mount namespace of its own, so that ``/dev/shm`` is not
shared; all have this machine's host name. What a user would have to do by hand is done here, all in a temporary folder:
keys, ``known_hosts``, the sshd's configuration.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hvd_cluster.topology import join_address

_SSHD_CONFIG = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
LogLevel ERROR
MaxStartups 100
"""
_numbers = itertools.count(1)


def missing_for_hosts() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for program in ("ip", "ssh", "ssh-keygen", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed (tests/apt.txt lists Debian's packages)"
    if not Path("/usr/sbin/sshd").exists():
        return "openssh-server is not installed (tests/apt.txt lists Debian's packages)"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"namespaces are not permitted here: {probe.stderr.strip()}"


@dataclass
class Machine:
    """One host."""

    name: str
    address: str
    #: The process that holds its namespaces, which is its sshd.
    sshd: subprocess.Popen[bytes]

    def command(self, *arguments: str) -> list[str]:
        """What runs ``arguments`` inside the machine."""
        return ["nsenter", f"--target={self.sshd.pid}", "--net", "--mount", "--", *arguments]

    def shell(self, line: str, *, check: bool = True) -> str:
        """The output of a line of shell inside the machine."""
        done = subprocess.run(self.command("sh", "-c", line), capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def processes(self) -> list[str]:
        """The command lines of what runs inside, but for sshd."""
        inode = _net(self.sshd.pid)
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if _net(folder.name) == inode:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if line and "sshd" not in line:
                        found.append(line)
        return found

    def cut(self) -> None:
        """Take its cable out: packets vanish, nobody gets a reset."""
        self.shell("ip link set eth0 down")


@dataclass
class Machines:
    """Several hosts on one wire."""

    folder: Path
    bridge: str
    #: The address of the test's own process on the wire.
    address: str
    machines: list[Machine] = field(default_factory=list)

    def __getitem__(self, index: int) -> Machine:
        return self.machines[index]

    @property
    def key(self) -> str:
        """The private key that opens all of them."""
        return str(self.folder / "user_key")

    def hosts(self, slots: int) -> str:
        """The argument of ``-H``."""
        return ",".join(join_address(machine.address, slots) for machine in self.machines)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for hvdrun: an ssh that keeps the keys of these hosts out of the user's ``known_hosts``."""
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    """Makes that many machines; skips with the reason where that is not possible."""
    if why := missing_for_hosts():
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        yield lambda count, *, ipv6=False: _build(count, tmp_path, stack, "fd77:{}::{}" if ipv6 else "10.77.{}.{}")


def _build(count: int, tmp_path: Path, stack: contextlib.ExitStack, pattern: str) -> Machines:
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -o UserKnownHostsFile={folder}/known_hosts "$@"\n'
    )
    (folder / "bin/ssh").chmod(0o755)
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    net, bridge = _bridge()
    stack.callback(_run, "ip", "link", "del", bridge)
    made = Machines(folder, bridge, pattern.format(net, 254))
    _run("ip", "addr", "add", *_network(made.address), "dev", bridge)
    _run("ip", "link", "set", bridge, "up")
    for index in range(1, count + 1):
        made.machines.append(_machine(made, net, pattern.format(net, index), index, stack))
    for machine in made.machines:
        _await_ssh(made, machine)
    return made


def _bridge() -> tuple[int, str]:
    """A wire with a network of its own, which no other tests of this machine use; the network's number and its name."""
    while True:
        net = (os.getpid() + next(_numbers)) % 250 + 1
        bridge = f"hvdbr{net}"
        done = subprocess.run(
            ["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return net, bridge
        assert "File exists" in done.stderr, done.stderr


def _network(address: str) -> tuple[str, ...]:
    """The arguments of ``ip addr add``; an IPv6 address can be used at once, without a search for duplicates."""
    return (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)


def _machine(made: Machines, net: int, address: str, index: int, stack: contextlib.ExitStack) -> Machine:
    # A private /dev/shm, then sshd as the process that the namespaces live and die with.
    script = (
        "mount -t tmpfs -o size=16m tmpfs /dev/shm && ip link set lo up && read go && "
        f"exec /usr/sbin/sshd -D -e -f {made.folder}/sshd_config"
    )
    with (made.folder / f"sshd.{index}.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    stack.callback(_end, process)
    machine = Machine(f"host{index}", address, process)
    _await_namespace(process)
    inside, outside = "eth0", f"hvd{net}x{index}"
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", str(process.pid))
    _run("ip", "link", "set", outside, "master", made.bridge, "up")
    machine.shell(f"ip addr add {' '.join(_network(address))} dev {inside} && ip link set {inside} up")
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    return machine


def _await_namespace(process: subprocess.Popen[bytes]) -> None:
    own, deadline_s = _net("self"), time.monotonic() + 10
    while _net(process.pid) == own:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _await_ssh(made: Machines, machine: Machine) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        line = [str(made.folder / "bin/ssh"), "-i", made.key, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"]
        done = subprocess.run([*line, machine.address, "true"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline_s, done.stderr
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The sshd, its sessions, and everything else in its network namespace."""
    with contextlib.suppress(OSError):
        inode = _net(process.pid)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if _net(folder.name) == inode and int(folder.name) != process.pid:
                    os.kill(int(folder.name), signal.SIGKILL)
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _net(pid: int | str) -> int:
    """What tells a process's network namespace from others."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
