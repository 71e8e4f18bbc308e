"""How a command gets to another host: the arguments of ssh. Pure, but for the question what ssh itself would do."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: What ssh says of a host that is not up yet; in Kubernetes its name is not known before.
_PASSING = (
    *("Connection refused", "Connection reset", "Connection timed out", "Connection closed", "No route to host"),
    *("Could not resolve hostname", "kex_exchange_identification"),
)
#: As ``-m`` would, but without the login's home folder in front of the standard library (``-P`` came with Python 3.11).
_AGENT = (
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); from hvd_cluster.launch.agent import main; sys.exit(main())"
)
_NOT_FOUND, _NOT_EXECUTABLE, _SSH_FAILED = 127, 126, 255


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """The user's wishes about ssh."""

    #: The port of all hosts; None for what ssh's own configuration says.
    port: int | None = None
    #: A private key; None for what ssh's own configuration says.
    identity_file: str | None = None
    #: Seconds until a host that does not answer is given up.
    connect_timeout_s: float = 30.0
    #: The Python that has hvd_cluster on the other hosts.
    python: str = sys.executable

    def arguments(self, host: str, command: Sequence[str]) -> list[str]:
        """``ssh ... host command``. It never asks anything, for nobody could answer, and gives up on a dead network.

        A host key that is new is taken, as Horovod does; one that has changed is refused, unless the user's own
        configuration of ssh says something about it.
        """
        host = _without_brackets(host)
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": f"{max(1, round(self.connect_timeout_s))}",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "2",
            "LogLevel": "ERROR",
        }
        line = ["ssh", "-T", "-x"]
        for name, value in {**options, **self._host_key_option(host)}.items():
            line += ["-o", f"{name}={value}"]
        if self.port is not None:
            line += ["-p", str(self.port)]
        if self.identity_file is not None:
            line += ["-i", self.identity_file, "-o", "IdentitiesOnly=yes"]
        return [*line, host, shlex.join(command)]

    def agent_command(self, environment: Mapping[str, str]) -> list[str]:
        """What runs on the other host, with ``environment`` on top of its own: nothing in it may be secret."""
        settings = [f"{name}={value}" for name, value in environment.items()]
        # `exec env`, which any login shell understands; no shell stays between sshd and the agent.
        return ["exec", "env", *settings, self.python, "-c", _AGENT]

    def _host_key_option(self, host: str) -> dict[str, str]:
        ssh = shutil.which("ssh")
        if ssh is None:
            return {}
        told = subprocess.run([ssh, "-G", host], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        return {"StrictHostKeyChecking": "accept-new"} if "stricthostkeychecking ask" in told.stdout else {}


def _without_brackets(host: str) -> str:
    """``me@[fe80::1]`` as ``me@fe80::1``: ssh takes brackets for a part of the name."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.strip('[]')}"


def may_pass(exit_code: int, output: str) -> bool:
    """Whether that failure may pass by itself: a pod or a machine that is still on its way up. Pure."""
    return exit_code == _SSH_FAILED and any(text in output for text in _PASSING)


def ending(host: str, exit_code: int, output: str, python: str) -> str:
    """Why an ssh that should have stayed has ended, for people."""
    said = "".join(f"\n    {line}" for line in output.strip().splitlines())
    if exit_code == _SSH_FAILED:
        return (
            f"{host}: ssh could not connect; the launcher must get there without a password "
            f"(try: ssh {_without_brackets(host)} true), and -p and -i set the port and the key{said}"
        )
    if exit_code in (_NOT_FOUND, _NOT_EXECUTABLE):
        return (
            f"{host}: there is no {python} there; every host needs the same Python environment at the same path{said}"
        )
    return f"{host}: the launcher's agent ended with code {exit_code}{said}"
