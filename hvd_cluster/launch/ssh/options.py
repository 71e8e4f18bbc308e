"""The command line of ssh. Pure, except that it asks ssh about its configuration."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Messages of ssh about a host that is not up yet; in Kubernetes its name may not be known yet.
_TEMPORARY_ERRORS = (
    *("Connection refused", "Connection reset", "Connection timed out", "Connection closed", "No route to host"),
    *("Could not resolve hostname", "kex_exchange_identification"),
)
#: Like ``-m``, but without the login's home directory in front of the standard library (``-P`` needs Python 3.11).
_AGENT = (
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); from hvd_cluster.launch.agent import main; sys.exit(main())"
)
_NOT_FOUND, _NOT_EXECUTABLE, _SSH_FAILED = 127, 126, 255


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """The user's options for ssh."""

    #: The port of all hosts; None for ssh's own configuration.
    port: int | None = None
    #: A private key; None for ssh's own configuration.
    identity_file: str | None = None
    #: Seconds after which a host that does not respond has failed.
    connect_timeout_s: float = 30.0
    #: The Python that has hvd_cluster on the other hosts.
    python: str = sys.executable

    def arguments(self, host: str, command: Sequence[str]) -> list[str]:
        """``ssh ... host command``.

        It never prompts, because no one could answer, and exits if the network is dead. A new host key is accepted, as
        in Horovod; a changed one is refused, unless the user's ssh configuration says otherwise.
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
        """The command that runs the agent, with ``environment`` added to its own.

        The command is visible on both hosts, so the environment must not contain secrets.
        """
        settings = [f"{name}={value}" for name, value in environment.items()]
        # `exec env` works in any login shell, and no shell remains between sshd and the agent.
        return ["exec", "env", *settings, self.python, "-c", _AGENT]

    def _host_key_option(self, host: str) -> dict[str, str]:
        ssh = shutil.which("ssh")
        if ssh is None:
            return {}
        config = subprocess.run(
            [ssh, "-G", host], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        return {"StrictHostKeyChecking": "accept-new"} if "stricthostkeychecking ask" in config.stdout else {}


def _without_brackets(host: str) -> str:
    """``me@[fe80::1]`` as ``me@fe80::1``: ssh takes brackets as part of the name."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.strip('[]')}"


def is_temporary(exit_code: int | None, output: str) -> bool:
    """Whether the failure may be temporary. Pure.

    A pod or a machine may still be starting.
    """
    return exit_code == _SSH_FAILED and any(text in output for text in _TEMPORARY_ERRORS)


def exit_reason(host: str, exit_code: int | None, output: str, python: str) -> str:
    """Why an ssh process has exited that should have kept running, as a message."""
    said = "".join(f"\n    {line}" for line in output.strip().splitlines())
    if exit_code == _SSH_FAILED:
        return (
            f"{host}: ssh could not connect; the launcher must be able to log in without a password "
            f"(try: ssh {_without_brackets(host)} true), and -p and -i set the port and the key{said}"
        )
    if exit_code in (_NOT_FOUND, _NOT_EXECUTABLE):
        return (
            f"{host}: {python} does not exist there; all hosts need the same Python environment at the same path{said}"
        )
    return f"{host}: the launcher's agent ended with code {exit_code}{said}"
