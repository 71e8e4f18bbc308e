"""One worker as its driver sees it: a Ray actor, its life and its calls."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hvd_cluster.errors import AuthenticationError, LaunchError
from hvd_cluster.launch.logs import OnLine, Tail
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.pickling import loads
from hvd_cluster.launch.process import OnEvent, StopCall, ignore_event
from hvd_cluster.launch.wire.messages import ProgressEvent
from hvd_cluster.ray.connection import ENDING_TEXT, Connection
from hvd_cluster.ray.messages import ActorHandshake, CallFinished, LogRecord, Message, OutputLines
from hvd_cluster.ray.pickling import dumps, outliving
from hvd_cluster.ray.session import first_line, full_store, load_ray
from hvd_cluster.ray.worker import WorkerAssignment
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.tcp_keepalive import detect_dead_host

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 15.0
#: No longer: its node may be gone, and Ray about to tell.
_REDIAL_TIMEOUT_S = 3.0
#: Seconds of silence after which Ray is asked whether the call is over: a worker may be too broken to say so itself.
_POLL_S = 2.0
#: Seconds that Ray gets, between two calls to a worker that has hung up, to tell how that ended: it learns of the death
#: of a process in a moment, of that of a node in some 14 s.
_RAY_ANSWER_S = 2.0

OnLog = Callable[[dict[str, Any]], None]


def ignore_log(info: dict[str, Any]) -> None:
    """An ``on_log`` that drops everything."""


@dataclass(frozen=True)
class ActorCall:
    """A method of :class:`hvd_cluster.ray.worker.BaseHorovodWorker` and its arguments."""

    method: str
    arguments: tuple[Any, ...]

    def give(self, handle: Any) -> Any:
        """Call the method of that actor; the ``ObjectRef`` of its result."""
        return getattr(handle, self.method).remote(*self.arguments)


@dataclass(frozen=True)
class OutputSinks:
    """Who hears what the workers say."""

    #: Gets every line of their output.
    on_line: OnLine
    #: Gets their progress reports.
    on_event: OnEvent = ignore_event
    #: Gets what they give to ``ray_logger.log``.
    on_log: OnLog = ignore_log


class ActorWorker:
    """A worker; see :class:`hvd_cluster.launch.worker_group.Worker`. A thread of its own follows its life.

    Args:
        connection: the one to the cluster in which the actor is.
        handle: the actor.
        handshake: the ``ObjectRef`` of its handshake.
        rank: names it until it is settled.
        assign: says what it becomes, once it has greeted.
        sinks: who hears it.
        on_change: called, from another thread, whenever ``ready``, ``reported`` or ``outcome`` has changed.
        only_call: what it does as soon as it is ready; the actor ends with that. None: it waits for :meth:`submit`.
    """

    def __init__(
        self,
        connection: Connection,
        handle: Any,
        handshake: Any,
        rank: int,
        assign: Callable[[ActorHandshake], WorkerAssignment],
        sinks: OutputSinks,
        on_change: Callable[[], None],
        only_call: ActorCall | None = None,
    ) -> None:
        self.rank = rank
        self.ready = False
        self.reported: Outcome | None = None
        self.outcome: Outcome | None = None
        #: What ``sinks.on_event`` raised to stop the call.
        self.stop_call: StopCall | None = None
        #: Where it runs; None before it has greeted.
        self.handshake: ActorHandshake | None = None
        #: Who hears it now; a call may bring sinks of its own.
        self.sinks = sinks
        self._connection = connection
        self._handle = handle
        self._handshake_ref = handshake
        self._assign = assign
        self._on_change = on_change
        self._only_call = only_call
        self._tail = Tail()
        self._lock = threading.Lock()
        self._secret = b""
        self._pending: Any = None
        self._stopping = False
        self._thread = threading.Thread(target=self._follow, name=f"hvd-actor-{rank}", daemon=True)
        self._thread.start()

    @property
    def output_tail(self) -> str:
        """The last lines of its output."""
        return self._tail.text()

    def submit(self, order: ActorCall) -> None:
        """Let it do ``order``; :attr:`reported` says how that ended."""
        with self._lock:
            self.reported = None
            self._pending = self._give(order)

    def submit_remote(self, order: ActorCall) -> Any:
        """Let it do ``order``; the ``ObjectRef`` of what that returns, or raises."""
        return self._give(order)

    def forget_report(self) -> None:
        """The call is over, and its report taken: a worker that ends from now on has not answered the next call."""
        with self._lock:
            self.reported = None

    def outliving(self, outcome: Outcome) -> Outcome:
        """``outcome``, good for after this worker's end."""
        return outcome if self.handshake is None else outliving(outcome, self.handshake.worker_id)

    def terminate(self) -> None:
        """End it. Ray knows no gentler way that would reach a worker that computes."""
        self.kill()

    def kill(self) -> None:
        """End it."""
        self._stopping = True
        with contextlib.suppress(Exception):  # Ray itself may have gone, and its actors with it
            self._connection.ray().kill(self._handle)

    def _give(self, order: ActorCall) -> Any:
        self._connection.ray()
        return order.give(self._handle)

    def wait(self) -> Outcome | None:
        """Wait until it has ended."""
        self._thread.join()
        return self.outcome

    # --- its life, in its thread -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """From the handshake to the end."""
        try:
            fate = self._until_lost()
        except SystemExit:  # what ray.shutdown() raises in other threads that wait for Ray
            fate = self._left_behind()
        with self._lock:
            if self.outcome is None:
                self.outcome = self.reported or fate  # what it reported counts, whatever ended it afterwards
        self._on_change()

    def _until_lost(self) -> Outcome:
        try:
            self.handshake = handshake = self._get(self._handshake_ref)
            channel = self._begin(handshake)
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker is lost, and its outcome says why
            loss = self._loss(error)
            self.kill()
            return loss
        while True:
            with contextlib.closing(channel), contextlib.suppress(EOFError, OSError, AuthenticationError):
                self._listen(channel)
            called = self.outcome or self._call_again(handshake)
            if isinstance(called, Outcome):
                return called
            channel = called

    def _get(self, ref: Any) -> Any:
        """What ``ref`` comes to. By turns: Ray 2.40 never ends a wait that ``ray.shutdown()`` finds under way."""
        timeout = load_ray().exceptions.GetTimeoutError
        while True:
            with contextlib.suppress(timeout):
                return self._connection.ray().get(ref, timeout=_POLL_S)

    def _listen(self, channel: Channel) -> None:
        """Hear what it says until it has ended, or the connection has."""
        channel.settimeout(_POLL_S)
        while self.outcome is None:
            try:
                message: Message = pickle.loads(channel.recv())
            except TimeoutError:
                if self._is_over():
                    self._take_report()
            else:
                self._hear(message)

    def _begin(self, handshake: ActorHandshake) -> Channel:
        """Settle the actor, and call it."""
        assignment = self._assign(handshake)
        self.rank = assignment.topology.rank
        self._get(self._handle.assign.remote(assignment))
        self._secret = assignment.topology.secret
        channel = self._dial(handshake, _CALL_TIMEOUT_S)
        self.ready = True
        if self._only_call is not None:
            self.submit(self._only_call)
        self._on_change()
        return channel

    def _dial(self, handshake: ActorHandshake, timeout_s: float) -> Channel:
        address = (handshake.address, handshake.driver_port)
        try:
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(socket.create_connection(address, timeout=timeout_s))
                detect_dead_host(sock)
                channel = Channel.connect(sock, self._secret, timeout_s)
                channel.settimeout(_CALL_TIMEOUT_S)
                channel.send(pickle.dumps("the driver"))
                channel.recv()  # it captures its output from here on
                stack.pop_all()
        except (OSError, EOFError) as error:
            raise LaunchError(
                f"rank {self.rank} on node {handshake.address} ({handshake.hostname}) cannot be reached by the driver "
                f"at port {handshake.driver_port}: {error}. Open the ports between the nodes."
            ) from error
        return channel

    def _hear(self, message: Message) -> None:
        if isinstance(message, CallFinished):
            self._take_report()
            return
        try:
            if isinstance(message, OutputLines):
                for text in message.texts:
                    self._tail.add(text)
                    self.sinks.on_line(self.rank, message.stream, text)
            elif isinstance(message, ProgressEvent):
                self.sinks.on_event(self.rank, message.fields)
            elif isinstance(message, LogRecord):
                self.sinks.on_log(loads(message.info))
        except Exception:  # a caller's broken sink must not cost the job
            logger.exception("what rank %d said could not be passed on", self.rank)

    def _take_report(self) -> None:
        """The call is over: have Ray bring its result. Where that is the news of a death, the connection ends next."""
        with self._lock:
            pending = self._pending
        if pending is not None:  # else somebody else waits for the result
            with contextlib.suppress(load_ray().exceptions.RayActorError):
                self._report(self._result(pending))

    def _report(self, outcome: Outcome) -> None:
        if self._only_call is not None:
            outcome = self.outliving(outcome)
        with self._lock:
            self._pending = None
            self.reported = replace(outcome, output_tail=self.output_tail)
        if self._only_call is not None:
            self.kill()  # it has done what it was made for
            self.outcome = self.reported
        self._on_change()

    def _result(self, pending: Any, timeout_s: float | None = None) -> Outcome:
        """What Ray brings; raises RayActorError where the worker has died, and GetTimeoutError."""
        ray = self._connection.ray()
        try:
            outcome: Outcome = ray.get(pending, timeout=timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            raise
        except ray.exceptions.ObjectLostError as error:  # large ones stay there until they are fetched
            logger.debug("rank %d: %s", self.rank, error)
            return replace(self._ended(), ending_text="had finished, but its result was lost with its node")
        except Exception as error:  # noqa: BLE001 - the result could not be stored or brought: that is how the call ended
            return self._failure(full_store("what the function returned", error) or error)
        return outcome

    def _call_again(self, handshake: ActorHandshake) -> Outcome | Channel:
        """The worker has hung up: how it ended; or a new connection, where it lives and only the line had broken.

        It breaks where this process is stopped for a while, or nobody takes what it prints. That costs lines, no more.
        """
        while not self._stopping:
            try:
                is_idle = self._answers()
            except Exception as error:  # noqa: BLE001 - it has died, or Ray itself has gone
                return self._loss(error)
            if self.outcome is not None:
                break
            try:
                channel = self._dial(handshake, _REDIAL_TIMEOUT_S)
            except (LaunchError, AuthenticationError) as error:
                logger.debug("%s", error)
                if is_idle:
                    self.kill()
                    return replace(self._ended(), ending_text="was lost: its connection to the driver broke")
            else:
                logger.warning(
                    "rank %d: its connection to the driver broke, and is there again. What it wrote meanwhile is in "
                    "Ray's own log of its process, if anywhere",
                    self.rank,
                )
                return channel
        return self.outcome or replace(self._ended(), stopped=True)

    def _answers(self) -> bool:
        """Whether it lives and is idle, the report of its last call taken; False while it is busy."""
        ray = self._connection.ray()
        try:
            if self._pending is not None:
                self._report(self._result(self._pending, _RAY_ANSWER_S))
            else:
                ray.get(self._handle.hostname.remote(), timeout=_RAY_ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            return False
        return True

    def _is_over(self) -> bool:
        """There is a result to fetch, or the news of a death."""
        if self._pending is None:
            return False
        with contextlib.suppress(Exception):  # Ray itself may have gone: the connection ends next
            return bool(self._connection.ray().wait([self._pending], timeout=0, fetch_local=False)[0])
        return False

    def _loss(self, error: Exception) -> Outcome:
        """How it ended, from what was raised where Ray was asked about it."""
        if self._connection.has_ended:  # ray.shutdown() ends the actors too, and their deaths may be heard first
            return self._left_behind()
        return self._death(error) if isinstance(error, load_ray().exceptions.RayActorError) else self._failure(error)

    def _death(self, error: Exception) -> Outcome:
        """Ray's own words about the death of an actor, as an outcome."""
        text = str(error)
        logger.debug("rank %d: %s", self.rank, text)
        if self._stopping:
            return replace(self._ended(), stopped=True)
        if code := re.search(r"exit code (\d+)", text):
            return replace(self._ended(), exit_code=int(code[1]))
        return replace(self._ended(), ending_text=_ending_text(type(error).__name__, text))

    def _left_behind(self) -> Outcome:
        """Ray has ended it, or will: this process cannot ask any more."""
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
    if "node" in text and ("terminated" in text or "has died" in text) and "worker process has died" not in text:
        return "died with its node"
    if kind == "ActorUnavailableError":
        return "does not answer: its process or its node was lost"
    if "connection error code" in text or "SIGKILL" in text:
        return "died: its process was killed, perhaps out of memory, or it crashed in native code"
    if kind == "ActorUnschedulableError":
        return f"could not be started: {first_line(Exception(text))}"
    return f"died: {first_line(Exception(text.rpartition(chr(10))[2]))}"
