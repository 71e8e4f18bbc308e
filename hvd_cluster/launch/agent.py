"""The launcher's process on another host; ssh calls :func:`main`.

The launcher sends a bootstrap message to its standard input. The agent then connects to the launcher over TCP, proves
that it knows the secret, and starts workers on request. It ends, and with it every worker, as soon as the standard
input or the connection closes or the launcher's host is unreachable.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch import reachability
from hvd_cluster.launch.reachability import listen_for_probes
from hvd_cluster.launch.task import start_worker
from hvd_cluster.launch.wire.agent_messages import (
    END,
    STOP_PROBING,
    Acknowledged,
    AgentHandshake,
    BootstrapMessage,
    Probe,
    ProbeResult,
    SendWindow,
    SignalWorker,
    StartFailed,
    StartWorker,
    WorkerStatus,
)
from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent
from hvd_cluster.launch.worker_group import STOP_GRACE_S, Callbacks, Worker
from hvd_cluster.rendezvous.addresses import host_key, listening_addresses, outward_interfaces
from hvd_cluster.rendezvous.channel import Channel, HungUpError
from hvd_cluster.rendezvous.sockets import ANY, ReservedPort, detect_dead_host
from hvd_cluster.topology import join_address
from hvd_cluster.version import __version__

_CONNECT_TIMEOUT_S, _AUTHENTICATION_TIMEOUT_S = 5.0, 10.0
#: Seconds for which an agent reconnects when the launcher dropped its connection, and between two attempts.
_RECONNECT_S, _RETRY_S = 30.0, 0.2


class Agent:
    """Starts workers on this host for a launcher elsewhere.

    Args:
        env: variables of this host for its workers; the variables of their task override them.
        owns_devices: see :class:`~hvd_cluster.launch.wire.agent_messages.AgentHandshake`.
    """

    def __init__(
        self, channel: Channel, env: Mapping[str, str | None] | None = None, *, owns_devices: bool = False
    ) -> None:
        self._channel = channel
        self._env = dict(env or {})
        self._owns_devices = owns_devices
        self._workers: dict[int, Worker] = {}
        self._window = SendWindow()
        self._secret = b""

    def serve(self, name: str, secret: bytes, interfaces: Sequence[str] = ()) -> None:
        """Follow the launcher's requests until it sends END or disconnects.

        Then stop all workers.

        Args:
            name: the name that the launcher uses for this host.
            interfaces: names, or prefixes of names, of the network interfaces to use.
        """
        self._secret = secret
        where = listening_addresses(list(interfaces))
        with contextlib.closing(listen_for_probes(secret, name, where)) as probe_listener, ReservedPort(ANY) as master:
            self._send(
                AgentHandshake(
                    name,
                    host_key(),
                    socket.gethostname(),
                    outward_interfaces(),
                    self._channel.local_host,
                    probe_listener.port,
                    master.port,
                    self._owns_devices,
                    __version__,
                )
            )
            try:
                while (message := self._channel.recv()) != END:
                    if (request := pickle.loads(message)) == STOP_PROBING:
                        probe_listener.close(0.0)
                    else:
                        self._handle(request)
            finally:
                self._window.close()
                self._stop_all()

    def _handle(self, request: Probe | StartWorker | SignalWorker | Acknowledged) -> None:
        if isinstance(request, Acknowledged):
            self._window.release(request.num_bytes)
        elif isinstance(request, Probe):
            # In a thread, so that a signal for a worker does not wait for addresses that time out.
            threading.Thread(target=self._probe, args=(request,), name="hvd-probe", daemon=True).start()
        elif isinstance(request, StartWorker):
            self._start(request)
        elif (worker := self._workers.get(request.key)) is not None:
            getattr(worker, request.signal.value)()

    def _probe(self, request: Probe) -> None:
        self._send(ProbeResult(reachability.probe(request.candidates, self._secret), request.number))

    def _start(self, request: StartWorker) -> None:
        def on_change() -> None:
            worker = self._workers.get(request.key)
            if worker is not None:
                state = (worker.ready, worker.reported, worker.outcome, worker.place)
                self._send(WorkerStatus(request.key, *state))

        def on_line(_rank: int, stream: str, text: str) -> None:
            line = pickle.dumps(OutputLine(request.key, stream, text))
            self._window.acquire(len(line))
            self._send_pickled(line)

        def on_event(_rank: int, event: dict[str, Any]) -> None:
            self._send(ProgressEvent(request.key, event))

        task = replace(request.task, env={**self._env, **request.task.env})
        topology = replace(request.topology, secret=self._secret)
        callbacks = Callbacks(on_line=on_line, on_event=on_event, on_change=on_change)
        try:
            worker = start_worker(task, topology, request.env, callbacks)
        except (OSError, TypeError, ValueError) as error:
            self._send(StartFailed(request.key, f"{type(error).__name__}: {error}"))
            return
        self._workers[request.key] = worker
        on_change()  # for changes before the worker was in the table

    def _send(self, message: object) -> None:
        self._send_pickled(pickle.dumps(message))

    def _send_pickled(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone; serve() notices and stops the workers
            self._channel.send(message)

    def _stop_all(self) -> None:
        for worker in self._workers.values():
            worker.terminate()
        killer = threading.Timer(STOP_GRACE_S, self._kill_all)
        killer.start()
        for worker in self._workers.values():
            worker.wait()
        killer.cancel()

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()


def main() -> int:
    """Run as a launcher's agent; the first line of stdin is its bootstrap message."""
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C is handled by the launcher
        # Not SIG_IGN, which the workers would inherit; exec resets a handler.
        signal.signal(number, lambda *_: None)
    line = sys.stdin.buffer.readline()
    if not line:
        sys.stderr.write("hvd_cluster's agent: the launcher ended before it sent its bootstrap message\n")
        return 1
    bootstrap = BootstrapMessage.from_line(line)
    # If this process dies here, the guard (guard.py) kills the workers' process groups.
    threading.Thread(target=_exit_on_close, args=(sys.stdin.fileno(),), name="hvd-parent-watch", daemon=True).start()
    try:
        os.chdir(bootstrap.cwd)
    except OSError as error:
        sys.stderr.write(
            f"cannot change to {bootstrap.cwd}, the launcher's working directory, on {bootstrap.name}: "
            f"{error.strerror}. Start hvdrun in a directory that exists on all hosts.\n"
        )
        return 1
    sys.path[:] = dict.fromkeys([*bootstrap.sys_path, *sys.path])
    channel = _connect_to_launcher(bootstrap)
    if channel is None:
        return 1
    with contextlib.suppress(EOFError, OSError, AuthenticationError), contextlib.closing(channel):
        Agent(channel, bootstrap.env).serve(bootstrap.name, bytes.fromhex(bootstrap.secret), bootstrap.interfaces)
    return 0


def _connect_to_launcher(bootstrap: BootstrapMessage) -> Channel | None:
    deadline_s = time.monotonic() + _RECONNECT_S
    while True:
        failures: list[str] = []
        was_dropped = False
        for address in bootstrap.addresses:
            try:
                return Channel.open(
                    address,
                    bootstrap.port,
                    bytes.fromhex(bootstrap.secret),
                    _CONNECT_TIMEOUT_S,
                    detect_dead_host,
                    authentication_timeout_s=_AUTHENTICATION_TIMEOUT_S,
                )
            except OSError as error:  # AuthenticationError too: another machine has this address here
                failures.append(f"{join_address(address, bootstrap.port)} ({error})")
                was_dropped |= isinstance(error, HungUpError)  # by many other connections to the launcher
        if not was_dropped or time.monotonic() >= deadline_s:
            break
        time.sleep(_RETRY_S)
    sys.stderr.write(
        f"{bootstrap.name} cannot connect to the launcher at any of its addresses: {', '.join(failures)}. "
        "Open the ports between the hosts, or set the interfaces to use with --network-interfaces.\n"
    )
    return None


def _exit_on_close(descriptor: int) -> None:
    """Exit this process when the launcher's ssh closes the standard input."""
    read = functools.partial(os.read, descriptor, 4096)
    with contextlib.suppress(OSError):
        while read():
            pass
    os._exit(1)
