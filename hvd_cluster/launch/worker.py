"""The worker's process: ``hvd_cluster.launch.worker FD PARENT_PID``.

It is the main module. Its topology comes from the environment, and its parent is at the other end of an inherited
socket: the driver, an agent or a Spark task. The parent sends requests, each with one call; the worker sends "ready",
progress events, and one Outcome per request. If the parent is gone, this process exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hvd_cluster.errors import AuthenticationError, LaunchError
from hvd_cluster.launch import progress
from hvd_cluster.launch.call import PackedCall, unpack
from hvd_cluster.launch.child import STACK_SIGNAL
from hvd_cluster.launch.die_with_parent import die_with_parent
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.output import flush_prints
from hvd_cluster.launch.pickling import Dumps, References, dumps
from hvd_cluster.launch.torch_group import torch_group
from hvd_cluster.launch.wire.messages import END, ProgressEvent, Ready, RunRequest
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.topology import Topology

_HANDSHAKE_TIMEOUT_S = 120.0  # the parent may be busy starting many workers


def main() -> int:
    """Serve the parent until it has no more requests."""
    descriptor, parent_pid = map(int, sys.argv[1:])
    del sys.argv[1:]  # the user's function may parse its own
    # An ``executable`` may be a script with Python as its child; then the closed channel signals the parent's end.
    die_with_parent(parent_pid, notices_its_end=True)
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    topology = Topology.from_env()
    channel = Channel.connect(socket.socket(fileno=descriptor), topology.secret, _HANDSHAKE_TIMEOUT_S)
    channel.send(pickle.dumps(Ready(os.getpid())))
    progress.attach(lambda fields: channel.send(pickle.dumps(ProgressEvent(topology.rank, fields))))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), name="hvd-requests", daemon=True).start()
    while (message := requests.get()) != END:
        request: RunRequest = pickle.loads(message)
        sys.path[:] = dict.fromkeys([*request.sys_path, *sys.path])
        outcome = perform(request.call, topology)
        flush_prints()
        channel.send(pickle.dumps(outcome))
    return 0


def perform(
    call: bytes | PackedCall,
    topology: Topology,
    *more: Any,
    keep: Callable[[Any], None] | None = None,
    dumps: Dumps = dumps,
    is_alone: bool = False,
) -> Outcome:
    """Run a packed call here and return its outcome.

    Nothing that the function raises leaves this function. A process that the function forks never returns: it ends
    where the function does, as if that were its program.

    Args:
        keep: called with the result, which then stays in this process; None is returned in its place.
        dumps: pickles what the call returns or raises.
        is_alone: the other ranks do not run this call, so there is no group of torch.distributed for it.
    """
    value: bytes | None = None
    references: References = ()
    error: ErrorReport | None = None
    exit_code: int | None = None
    try:
        function = unpack(call)
        with contextlib.nullcontext() if is_alone else torch_group():
            result = _called(function, more)
        if keep is not None:
            keep(result)
            result = None
        value, references = _pickled_result(result, topology.rank, dumps)
    except SystemExit as request:
        exit_code = _exit_code_of(request)
        if exit_code == 0:
            value, references = dumps(None)
        else:
            error = ErrorReport.of(request, dumps)
    except BaseException as raised:  # noqa: BLE001 - also KeyboardInterrupt and the like: the launcher decides
        error = ErrorReport.of(raised, dumps)
    return Outcome(
        topology.rank,
        topology.host,
        value,
        error,
        exit_code or None,
        finished_at=time.time(),
        references=references,
    )


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What the function returns, in this process.

    A process that it forks ends here, because the launcher waits for this one.
    """
    pid = os.getpid()
    try:
        result = function(*arguments)
    except BaseException as error:  # whatever it is: raised again, but not out of a forked process
        if os.getpid() != pid:
            _end_fork(error)
        raise
    if os.getpid() != pid:
        _end_fork(None)
    return result


def _end_fork(error: BaseException | None) -> NoReturn:
    """End this process as the interpreter would, without inherited handlers.

    They are for its parent's exit.
    """
    exit_code = _exit_code_of(error) if isinstance(error, SystemExit) else int(error is not None)
    try:
        if isinstance(error, SystemExit):
            if exit_code and not isinstance(error.code, int):
                sys.stderr.write(f"{error.code}\n")
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        flush_prints()
    finally:  # also if the user's stream or hook is broken
        os._exit(exit_code)


def _pickled_result(result: Any, rank: int, dumps: Dumps) -> tuple[bytes, References]:
    try:
        return dumps(result)
    except Exception as why:  # pickling runs user code, which may raise anything
        raise LaunchError(
            f"the result of rank {rank}, of type {type(result).__qualname__}, cannot be pickled ({why}): "
            "return plain data"
        ) from why


def _exit_code_of(request: SystemExit) -> int:
    """The exit code that the interpreter would use."""
    if request.code is None:
        return 0
    return request.code & 0xFF if isinstance(request.code, int) else 1


def _listen(channel: Channel, requests: queue.SimpleQueue[bytes]) -> None:
    """Receive requests in a thread of its own.

    So the parent's end is noticed while the user's function runs.
    """
    try:
        while True:
            requests.put(channel.recv())
    except (EOFError, OSError, AuthenticationError):
        # The parent keeps the channel open until this process has ended, so no process waits for it any more.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
