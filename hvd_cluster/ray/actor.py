"""One worker as its driver sees it: a Ray actor, its life and its calls."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hvd_cluster.errors import AuthenticationError, LaunchError
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.pickling import loads
from hvd_cluster.launch.wire.messages import ProgressEvent
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.ray.messages import ActorHandshake, CallFinished, LogRecord, Message, OutputLines
from hvd_cluster.ray.pickling import detached, dumps
from hvd_cluster.ray.session import ENDING_TEXT, Connection, first_line, full_store, is_loss, load_ray
from hvd_cluster.ray.worker import WorkerAssignment
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.sockets import detect_dead_host

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 15.0
#: Short, because its node may be gone, which Ray will report soon.
_RECONNECT_TIMEOUT_S = 3.0
#: Seconds without a message after which Ray is asked whether the call has ended: a worker may be unable to report it.
_POLL_S = 2.0
#: Seconds for Ray to report, between two attempts to reconnect to a worker, how the worker ended. Ray notices the death
#: of a process within a moment, that of a node after about 14 s.
_RAY_ANSWER_S = 2.0

#: How an actor ended, by the name of Ray's error, whatever its text.
_ENDINGS = {
    "NodeDiedError": "died with its node",
    "OutOfMemoryError": "was killed by Ray: its node ran low on memory",
    "ActorPlacementGroupRemoved": "ended with its placement group, which was removed",
    "ActorUnavailableError": "does not answer: its process or its node was lost",
}

OnLog = Callable[[dict[str, Any]], None]


def ignore_log(info: dict[str, Any]) -> None:
    """An ``on_log`` that drops everything."""


@dataclass(frozen=True)
class ActorCall:
    """A method of a worker's actor, and its arguments.

    The actor is a :class:`hvd_cluster.ray.worker.BaseHorovodWorker`.
    """

    method: str
    arguments: tuple[Any, ...]

    def submit_to(self, handle: Any) -> Any:
        """Call the method of that actor; returns the ``ObjectRef`` of the result."""
        return getattr(handle, self.method).remote(*self.arguments)

    def numbered(self, number: int) -> ActorCall:
        """The same call, whose end the actor reports with a number.

        The method returns an outcome.
        """
        return ActorCall("run_call", (number, self.method, *self.arguments))


class ActorWorker(Worker):
    """A worker. Its own thread follows its life.

    Args:
        handshake: the ``ObjectRef`` of its handshake.
        rank: its rank until it is assigned.
        assign: returns its assignment, given its handshake.
        on_log: called, from another thread, with what it passes to ``ray_logger.log``.
        only_call: what it runs as soon as it is ready; the actor ends afterwards. None: it waits for :meth:`submit`.
    """

    def __init__(
        self,
        connection: Connection,
        handle: Any,
        handshake: Any,
        rank: int,
        assign: Callable[[ActorHandshake], WorkerAssignment],
        callbacks: Callbacks,
        on_log: OnLog = ignore_log,
        only_call: ActorCall | None = None,
    ) -> None:
        super().__init__(rank, callbacks)
        #: Where it runs; None before its handshake.
        self.handshake: ActorHandshake | None = None
        #: A call may have its own.
        self.on_log = on_log
        self._connection = connection
        self._handle = handle
        self._handshake_ref = handshake
        self._assign = assign
        self._only_call = only_call
        self._lock = threading.Lock()
        self._secret = b""
        self._pending: Any = None
        #: The number of the last call.
        self._number = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._follow, name=f"hvd-actor-{rank}", daemon=True)
        self._thread.start()

    def submit(self, call: ActorCall) -> None:
        """Start ``call``; its outcome becomes :attr:`reported`."""
        with self._lock:
            self.reported = None
            self._number += 1
            self._pending = self._submit(call.numbered(self._number))

    def submit_remote(self, call: ActorCall) -> Any:
        """Start ``call``; returns the ``ObjectRef`` of its result."""
        return self._submit(call)

    def forget_report(self) -> None:
        """Clear the report of the last call.

        A worker that ends from now on has not answered the next call.
        """
        with self._lock:
            self.reported = None

    def detached(self, outcome: Outcome) -> Outcome:
        """``outcome`` in a form that stays valid after this worker's end."""
        return outcome if self.handshake is None else detached(outcome, self.handshake.worker_id)

    @property
    def place(self) -> str:
        at = self.handshake
        return "not placed by Ray yet" if at is None else f"process {at.pid} on {at.hostname}"

    def write_stack(self) -> None:
        """Do nothing: a signal would have to be sent on the actor's node."""

    def terminate(self) -> None:
        """End it. Ray has no gentler way that reaches a busy worker."""
        self.kill()

    def kill(self) -> None:
        """End it."""
        self._stopping = True
        with contextlib.suppress(Exception):  # Ray itself may be gone, and its actors with it
            self._connection.ray().kill(self._handle)

    def _submit(self, call: ActorCall) -> Any:
        self._connection.ray()
        return call.submit_to(self._handle)

    def wait(self) -> Outcome | None:
        self._thread.join()
        return self.outcome

    # --- its life, in its thread -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """From the handshake to the end."""
        try:
            ending = self._until_lost()
        except SystemExit:  # ray.shutdown() raises it in threads that wait for Ray
            ending = self._lost_with_connection()
        except Exception as error:  # noqa: BLE001 - of any kind: the worker is lost, and its outcome says why
            ending = self._loss(error)
            self.kill()
        with self._lock:
            if self.outcome is None:
                self.outcome = self.reported or ending  # a report counts, whatever ended the worker afterwards
        self._callbacks.on_change()

    def _until_lost(self) -> Outcome:
        self.handshake = handshake = self._get(self._handshake_ref)
        channel = self._begin(handshake)
        while True:
            with contextlib.closing(channel), contextlib.suppress(EOFError, OSError, AuthenticationError):
                self._listen(channel)
            result = self.outcome or self._reconnect(handshake)
            if isinstance(result, Outcome):
                return result
            channel = result

    def _get(self, ref: Any) -> Any:
        """The value of a reference, polled: Ray 2.40 may wait after ``ray.shutdown()``."""
        timeout = load_ray().exceptions.GetTimeoutError
        while True:
            with contextlib.suppress(timeout):
                return self._connection.ray().get(ref, timeout=_POLL_S)

    def _listen(self, channel: Channel) -> None:
        """Handle its messages until it has ended or the connection breaks.

        Raises:
            RayError: Ray has lost it.
        """
        channel.settimeout(_POLL_S)
        was_finished = False
        while self.outcome is None:
            try:
                message: Message = pickle.loads(channel.recv())
            except TimeoutError:
                if was_finished:  # and what it had sent by then has been handled
                    self._take_report(self._number)
                was_finished = self._is_finished()
            else:
                was_finished = False
                self._handle_message(message)

    def _begin(self, handshake: ActorHandshake) -> Channel:
        """Assign the actor its topology, and connect to it."""
        assignment = self._assign(handshake)
        self.rank = assignment.topology.rank
        self._get(self._handle.assign.remote(assignment))
        self._secret = assignment.topology.secret
        channel = self._connect(handshake, _CONNECT_TIMEOUT_S)
        self.ready = True
        if self._only_call is not None:
            self.submit(self._only_call)
        self._callbacks.on_change()
        return channel

    def _connect(self, handshake: ActorHandshake, timeout_s: float) -> Channel:
        try:
            address, port = handshake.address, handshake.driver_port
            channel = Channel.open(address, port, self._secret, timeout_s, detect_dead_host)
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(channel.close)
                channel.settimeout(_CONNECT_TIMEOUT_S)
                channel.send(pickle.dumps("the driver"))
                channel.recv()  # from now on the worker captures its output
                on_failure.pop_all()
        except (OSError, EOFError) as error:
            raise LaunchError(
                f"rank {self.rank} on node {handshake.address} ({handshake.hostname}) cannot be reached by the driver "
                f"at port {handshake.driver_port}: {error}. Open the ports between the nodes."
            ) from error
        return channel

    def _handle_message(self, message: Message) -> None:
        if isinstance(message, CallFinished):
            self._take_report(message.number)
            return
        with self._passing_on():
            if isinstance(message, OutputLines):
                for text in message.texts:
                    self._tail.add(text)
                    self._callbacks.on_line(self.rank, message.stream, text)
            elif isinstance(message, ProgressEvent):
                self._callbacks.on_event(self.rank, message.fields)
            elif isinstance(message, LogRecord):
                self.on_log(loads(message.info))

    def _take_report(self, number: int) -> None:
        """A call has ended: fetch its result from Ray."""
        with self._lock:
            pending = self._pending if number == self._number else None
        if pending is not None:  # otherwise it was fetched before the message of its end came
            self._report(self._result(pending))

    def _report(self, outcome: Outcome) -> None:
        if self._only_call is not None:
            try:
                outcome = self.detached(outcome)
            except Exception as error:  # noqa: BLE001 - what raised in the task behind an ObjectRef, or Ray itself
                outcome = self._unfetched(error)
        with self._lock:
            self._pending = None
            self.reported = replace(outcome, output_tail=self.output_tail)
        if self._only_call is not None:
            self.kill()  # its only call is done
            self.outcome = self.reported
        self._callbacks.on_change()

    def _result(self, pending: Any, timeout_s: float | None = None) -> Outcome:
        """The result from Ray.

        Raises:
            RayError: see :func:`is_loss`: the worker has died, or Ray cannot reach it, although this process may.
            GetTimeoutError: the result is not available in time.
        """
        ray = self._connection.ray()
        try:
            outcome: Outcome = ray.get(pending, timeout=timeout_s)
        except Exception as error:  # it could not be stored or fetched
            if is_loss(error) or isinstance(error, ray.exceptions.GetTimeoutError):
                raise
            return self._unfetched(error)
        return outcome

    def _unfetched(self, error: Exception) -> Outcome:
        """Its outcome if ``error`` is all that Ray has of its result."""
        errors = load_ray().exceptions
        if isinstance(error, errors.ObjectLostError) and not isinstance(error, errors.RayTaskError):
            logger.debug("rank %d: %s", self.rank, error)  # large results stay on the node until they are fetched
            return replace(self._ended(), ending_text="had finished, but its result was lost with its node")
        return self._failure(full_store("what the function returned", error) or error)

    def _reconnect(self, handshake: ActorHandshake) -> Outcome | Channel:
        """A new connection if the worker still runs, else the worker's outcome.

        The connection breaks if this process is stopped for a while, or its output is not read. Only lines of output
        are lost.

        Raises:
            Exception: of any kind: it has died, or Ray itself is gone.
        """
        while not self._stopping:
            is_idle = self._answers()
            if self.outcome is not None:
                break
            try:
                channel = self._connect(handshake, _RECONNECT_TIMEOUT_S)
            except (LaunchError, AuthenticationError) as error:
                logger.debug("%s", error)
                if is_idle:
                    self.kill()
                    return replace(self._ended(), ending_text="was lost: its connection to the driver broke")
            else:
                logger.warning(
                    "rank %d: its connection to the driver broke and is restored. What it wrote in between may be in "
                    "Ray's log of its process",
                    self.rank,
                )
                return channel
        return self.outcome or replace(self._ended(), stopped=True)

    def _answers(self) -> bool:
        """Whether the actor lives and is idle, with its last report taken."""
        ray = self._connection.ray()
        try:
            if self._pending is not None:
                self._report(self._result(self._pending, _RAY_ANSWER_S))
            else:
                ray.get(self._handle.hostname.remote(), timeout=_RAY_ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            return False
        return True

    def _is_finished(self) -> bool:
        """Whether Ray has a result of the call, or reports that the actor has died."""
        if self._pending is None:
            return False
        with contextlib.suppress(Exception):  # Ray itself may be gone; the connection ends next
            return bool(self._connection.ray().wait([self._pending], timeout=0, fetch_local=False)[0])
        return False

    def _loss(self, error: Exception) -> Outcome:
        """Its outcome, from the exception that Ray raised about it."""
        if self._connection.has_ended:  # ray.shutdown() ends the actors too, and Ray may report their deaths first
            return self._lost_with_connection()
        return self._death(error) if is_loss(error) else self._failure(error)

    def _death(self, error: Exception) -> Outcome:
        """An outcome from Ray's message about the death of an actor."""
        text = str(error)
        logger.debug("rank %d: %s", self.rank, text)
        if self._stopping:
            return replace(self._ended(), stopped=True)
        if code := re.search(r"exit code (\d+)", text):
            return replace(self._ended(), exit_code=int(code[1]))
        return replace(self._ended(), ending_text=_ending_text(type(error).__name__, text))

    def _lost_with_connection(self) -> Outcome:
        """Ray has ended it, or will end it; this process cannot ask any more."""
        return (
            replace(self._ended(), stopped=True) if self._stopping else replace(self._ended(), ending_text=ENDING_TEXT)
        )

    def _failure(self, error: BaseException) -> Outcome:
        cause = getattr(error, "cause", None)
        report = ErrorReport.of(cause if isinstance(cause, BaseException) else error, dumps)
        return replace(self._ended(), error=report)

    def _ended(self) -> Outcome:
        host = "?" if self.handshake is None else self.handshake.address
        return Outcome(self.rank, host, finished_at=time.time(), output_tail=self.output_tail)


def _ending_text(kind: str, text: str) -> str:
    """How an actor ended, as the end of a sentence about its rank. Pure."""
    if kind in _ENDINGS:
        return _ENDINGS[kind]
    if "node" in text and ("terminated" in text or "has died" in text) and "worker process has died" not in text:
        return "died with its node"
    if kind == "WorkerCrashedError" or "connection error code" in text or "SIGKILL" in text:
        return "died: its process was killed, perhaps out of memory, crashed in native code, or called os._exit()"
    if kind == "ActorUnschedulableError":
        return f"could not be started: {first_line(Exception(text))}"
    return f"died: {first_line(Exception(text.rpartition(chr(10))[2]))}"
