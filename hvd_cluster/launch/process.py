"""Workers on this host, as children of this process."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch import die_with_parent
from hvd_cluster.launch.child import ChildProcess
from hvd_cluster.launch.environment import worker_environment
from hvd_cluster.launch.outcome import Outcome, is_user_code
from hvd_cluster.launch.wire.messages import END, ProgressEvent, Ready, RunRequest
from hvd_cluster.launch.worker_group import EXIT_GRACE_S, FAILURE_GRACE_S, STOP_GRACE_S, Callbacks, Worker
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.topology import Topology

logger = logging.getLogger(__name__)

#: Like ``-m``, but the current directory comes last: a module there must not hide one that starting the worker needs.
_WORKER = (
    "import sys; '' in sys.path[:1] and sys.path.append(sys.path.pop(0)); import runpy; "
    "runpy.run_module('hvd_cluster.launch.worker', run_name='__main__', alter_sys=True)"
)
_HANDSHAKE_TIMEOUT_S = 3600.0  # the worker group has its own time limit for the start


class ChildWorker(Worker):
    """A worker that is a child of this process."""

    _child: ChildProcess

    def __init__(self, topology: Topology, callbacks: Callbacks) -> None:
        super().__init__(topology.rank, callbacks)
        self.topology = topology
        self._stopping = False

    @property
    def place(self) -> str:
        return f"process {self._child.pid} on {self.topology.host}"

    def write_stack(self) -> None:
        self._child.write_stack()

    def terminate(self) -> None:
        self._stop(signal.SIGTERM)

    def kill(self) -> None:
        self._stop(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        self._stopping |= not self._child.ended_at  # processes that it has left behind may still run
        self._child.signal(number)


class WorkerProcess(ChildWorker):
    """A Python process that runs calls and reports their outcomes.

    It has its own process group. It dies with this process (see :mod:`hvd_cluster.launch.die_with_parent`), and so do
    the processes that it has started.

    Args:
        call: what :func:`hvd_cluster.launch.call.pack` returned: the process runs it and exits. If None, it waits for
            :meth:`submit`, any number of times, until :meth:`finish`.
        env: variables on top of this process's environment and the topology; None removes one.
        as_horovod: make ``import horovod`` work in the worker; None means as in this process. Launchers that start
            processes on other machines pass on the driver's value.

    Raises:
        OSError: the executable cannot be started.
    """

    def __init__(
        self,
        topology: Topology,
        call: bytes | None,
        callbacks: Callbacks,
        *,
        env: Mapping[str, str | None] | None = None,
        executable: str | None = None,
        as_horovod: bool | None = None,
    ) -> None:
        super().__init__(topology, callbacks)
        self._changed = threading.Condition()
        self._requests: list[bytes] = []
        self._is_finishing = False
        self._stopper: threading.Timer | None = None
        self._channel: Channel | None = None
        self._executable = executable

        self._socket, far_end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"hvd-worker-{self.rank}", daemon=True)
        command = [executable or sys.executable, "-c", _WORKER]
        self._child = ChildProcess(
            self.rank,
            [*command, str(far_end.fileno()), str(os.getpid())],
            worker_environment(topology, env or {}, as_horovod=as_horovod),
            pass_fds=[far_end.fileno()],
            on_line=callbacks.on_line,
            on_exit=self._exited,
        )
        self._tail = self._child.tail
        self._thread.start()
        try:
            self._child.start()
        except Exception:  # of any kind; the channel's thread must not wait for a child that does not exist
            self._disconnect()
            raise
        finally:
            far_end.close()
        if call is not None:
            self.submit(call)
            self.finish()

    @property
    def pid(self) -> int:
        """The process id, which is also the process group's."""
        return self._child.pid

    def submit(self, call: bytes) -> None:
        """Run a packed call when the previous ones are done."""
        self.reported = None
        self._send(pickle.dumps(RunRequest(call, _path_for(self._executable))))

    def forget_report(self) -> None:
        """Clear the report of the last call.

        A process that ends from now on has not answered the next call.
        """
        with self._changed:
            self.reported = None

    def finish(self) -> None:
        """Let the process exit when the submitted calls are done.

        One that does not is stopped after a while.
        """
        self._is_finishing = True
        self._send(END)

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait until the process is reaped and its output has been passed on.

        Its group is then gone too.

        Returns:
            Its outcome, or None if it still runs after ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.outcome is not None, timeout_s):
                return None
        self._child.join()
        self._thread.join()
        return self.outcome

    def _send(self, message: bytes) -> None:
        with self._changed:
            if self._channel is None:
                self._requests.append(message)
                return
        with contextlib.suppress(OSError):  # it has died; _exited says how
            self._channel.send(message)

    def _serve(self) -> None:
        """Receive messages until the worker closes its end; runs in a thread of its own."""
        try:
            channel = Channel.accept(self._socket, self.topology.secret, _HANDSHAKE_TIMEOUT_S)
            with self._changed:
                for request in self._requests:
                    channel.send(request)
                self._channel = channel
            while True:
                self._handle(pickle.loads(channel.recv()))
        except AuthenticationError as error:
            if self.ready:
                logger.error("rank %d sent a message without the job's signature and is stopped: %s", self.rank, error)
                self.kill()
        except (EOFError, OSError):
            pass  # it has ended; _exited says how

    def _handle(self, message: Ready | ProgressEvent | Outcome) -> None:
        if isinstance(message, ProgressEvent):
            with self._passing_on():
                self._callbacks.on_event(self.rank, message.fields)
            return
        if isinstance(message, Ready):
            self.ready = True
        else:
            self._child.catch_up()
            self.reported = replace(message, output_tail=self.output_tail)
            if self._is_finishing:
                self._stop_after(EXIT_GRACE_S if message.ok else FAILURE_GRACE_S)
        self._notify()

    def _stop_after(self, grace_s: float) -> None:
        """Stop the process if it does not exit by itself.

        Threads that the call has left keep an interpreter alive.
        """

        def stop() -> None:
            logger.warning("rank %d did not exit within %g s after its call: stopping it", self.rank, grace_s)
            self._stopper = self._timer(STOP_GRACE_S, self.kill)
            if self.outcome is not None:
                self._stopper.cancel()
            self.terminate()

        self._stopper = self._timer(grace_s, stop)

    def _timer(self, seconds: float, function: Callable[[], None]) -> threading.Timer:
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()
        return timer

    def _exited(self, exit_code: int | None) -> None:
        self._disconnect()
        with self._changed:
            self.outcome = self._final_outcome(exit_code)
        if self._stopper is not None:  # after the outcome, which a timer that ends now looks at
            self._stopper.cancel()
        self._notify()

    def _disconnect(self) -> None:
        """Close the channel; messages that the worker has already sent are still handled."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _final_outcome(self, exit_code: int | None) -> Outcome:
        if self.reported is not None:
            if self.reported.ok and exit_code and not self._stopping:
                logger.warning("rank %d ended with exit code %d after its result had arrived", self.rank, exit_code)
            return replace(self.reported, output_tail=self.output_tail)
        return Outcome(
            self.rank,
            self.topology.host,
            exit_code=exit_code,
            finished_at=self._child.ended_at or time.time(),
            output_tail=self.output_tail,
            stopped=self._stopping,
        )

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._callbacks.on_change()


def _path_for(executable: str | None) -> list[str]:
    """The part of ``sys.path`` that a worker gets.

    It is all of it, or if its Python is named, not this one's libraries. The rest is the user's code: the script's
    folder, and in a Spark task the files that the session has shipped.
    """
    return [entry for entry in sys.path if executable is None or is_user_code(str(entry))]


_NONE = pickle.dumps(None)  # the value of a command that succeeded


class ProgramProcess(ChildWorker):
    """A command as a worker of this host.

    See :class:`hvd_cluster.launch.worker_group.Worker`.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        topology: Topology,
        command: Sequence[str],
        callbacks: Callbacks,
        env: Mapping[str, str | None],
        as_horovod: bool | None,
    ) -> None:
        super().__init__(topology, callbacks)
        self.ready = True
        self._ended = threading.Event()
        self._child = ChildProcess(
            self.rank,
            [sys.executable, "-I", "-S", str(Path(die_with_parent.__file__)), str(os.getpid()), *command],
            worker_environment(topology, env, as_horovod=as_horovod),
            on_line=callbacks.on_line,
            on_exit=self._exited,
        )
        self._tail = self._child.tail
        self._child.start()

    def wait(self) -> Outcome | None:
        self._ended.wait()
        self._child.join()
        return self.outcome

    def _exited(self, exit_code: int | None) -> None:
        self.outcome = Outcome(
            self.rank,
            self.topology.host,
            value=_NONE if exit_code == 0 else None,
            exit_code=exit_code,
            finished_at=self._child.ended_at or time.time(),
            output_tail=self.output_tail,
            stopped=self._stopping and exit_code != 0,
        )
        self._ended.set()
        self._callbacks.on_change()
