"""Another host, reached through ssh: the ssh process that runs the agent there."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from hvd_cluster.launch import die_with_parent
from hvd_cluster.launch.child import ChildProcess
from hvd_cluster.launch.environment import agent_environment
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.ssh.options import SshOptions, exit_reason, is_temporary
from hvd_cluster.launch.wire.agent_messages import BootstrapMessage
from hvd_cluster.topology import inherited_env

logger = logging.getLogger(__name__)

#: Seconds for which a host that has disconnected waits for ssh's last output, and how many lines of it are shown.
_SSH_OUTPUT_S, _NUM_SSH_LINES = 2.0, 10


class SshHost(RemoteHost):
    """A host whose agent runs as long as our ssh process does.

    Raises:
        OSError: ssh cannot be started.
    """

    def __init__(
        self, host: Host, bootstrap: BootstrapMessage, options: SshOptions, on_change: Callable[[], None]
    ) -> None:
        super().__init__(host, on_change)
        #: It is gone, perhaps because it is still starting.
        self.may_be_starting = False
        self._options = options
        self._exit_code: int | None = None
        self._has_ended = threading.Event()
        reader, self._stdin = os.pipe()
        command = options.agent_command(agent_environment(inherited_env()))
        self._ssh = ChildProcess(
            0,
            [
                sys.executable,
                "-I",
                "-S",
                die_with_parent.__file__,
                str(os.getpid()),
                *options.arguments(host.name, command),
            ],
            inherited_env(),
            stdin=reader,
            on_line=self._on_ssh_line,
            on_exit=self._on_ssh_exit,
        )
        try:
            self._ssh.start()
            self._send_bootstrap(bootstrap.to_line())
        except BaseException:  # re-raised; the pipe would stay open
            os.close(self._stdin)
            raise
        finally:
            os.close(reader)

    def close(self, deadline_s: float) -> None:
        """Wait for the agent's end until ``deadline_s``, then close the connection.

        May be called twice.
        """
        ended = threading.Thread(target=self._ssh.join, name="hvd-ssh-end", daemon=True)
        ended.start()
        if self._channel is not None and not self.gone:
            ended.join(max(0.0, deadline_s - time.monotonic()))
        with contextlib.suppress(OSError):
            # This ends the agent, and its guard kills the workers. Only once, because the descriptor may be reused.
            stdin, self._stdin = self._stdin, -1
            if stdin >= 0:
                os.close(stdin)
        ended.join(1.0)
        self._ssh.signal(9)
        super().close(0.0)
        ended.join()

    def _send_bootstrap(self, line: bytes) -> None:
        """Write the message from a thread.

        An environment may be larger than the pipe's buffer.
        """
        writer = os.dup(self._stdin)

        def write() -> None:
            with contextlib.suppress(OSError), open(writer, "wb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
                rest = memoryview(line)
                while rest:
                    rest = rest[pipe.write(rest) or 0 :]

        threading.Thread(target=write, name="hvd-bootstrap", daemon=True).start()

    def _on_ssh_line(self, _rank: int, _stream: str, line: str) -> None:
        logger.info("%s: %s", self.host.name, line)

    def _on_ssh_exit(self, exit_code: int | None) -> None:
        if self._channel is None:
            self.may_be_starting = is_temporary(exit_code, self._ssh.tail.text())
            self._lose(exit_reason(self.host.name, exit_code, self._ssh.tail.text(), self._options.python))
        else:
            self._exit_code = exit_code
            self._has_ended.set()
            self._channel.close()  # the reader then reports it to the workers

    def _explain(self, why: str) -> str:
        """Add the output of ssh and the agent; the connection often ends before ssh does."""
        self._has_ended.wait(_SSH_OUTPUT_S)
        if self._exit_code is not None:
            why = f"ssh ended with code {self._exit_code}"
        return why + "".join(f"\n    {line}" for line in self._ssh.tail.text().strip().splitlines()[-_NUM_SSH_LINES:])
