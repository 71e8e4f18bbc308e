"""A worker as its driver sees it, with Ray's own exceptions and a real connection, but without Ray."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch.outcome import ErrorReport, Outcome, collect
from hvd_cluster.launch.wire.listener import listen_for_handshakes
from hvd_cluster.launch.worker_group import Callbacks, WorkerGroup
from hvd_cluster.ray import actor
from hvd_cluster.ray.actor import ActorCall, ActorWorker, _ending_text
from hvd_cluster.ray.actor_group import ActorGroup
from hvd_cluster.ray.elastic_adapter import fatal_reason
from hvd_cluster.ray.messages import ActorHandshake, CallFinished, Message, OutputLines
from hvd_cluster.ray.session import ENDING_TEXT
from hvd_cluster.rendezvous.channel import Channel

SECRET = b"s" * 32

DIED = "The actor died unexpectedly.\n\tpid: 5\nThe actor is dead because its worker process has died. "


@pytest.mark.parametrize(
    ("kind", "text", "ending_text"),
    [
        (
            "ActorDiedError",
            DIED + "Worker unexpectedly exits with a connection error code 2. End of file.",
            "was killed",
        ),
        ("ActorDiedError", "The actor died.\nThe actor died because its node has died.", "died with its node"),
        ("ActorDiedError", "The actor is dead because its node was terminated unexpectedly.", "died with its node"),
        ("ActorUnavailableError", "The actor 7 is unavailable: failed to connect.", "does not answer"),
        ("ActorUnschedulableError", "The actor is not schedulable: the node is gone", "could not be started"),
        ("ActorDiedError", "something new\nthat Ray says", "died: that Ray says"),
    ],
)
def test_rays_words_about_a_death_become_the_end_of_a_sentence(kind: str, text: str, ending_text: str) -> None:
    assert ending_text in _ending_text(kind, text)


class ShuttingDown:
    """A connection in the middle of ``ray.shutdown()``: the news of an actor's death comes as it ends."""

    def __init__(self, news: Exception) -> None:
        self.has_ended = False
        self._news = news

    def ray(self) -> Any:
        return self

    def get(self, ref: object, timeout: float) -> Any:
        del ref, timeout
        self.has_ended = True
        raise self._news


def test_an_actor_that_dies_of_rays_shutdown_has_ended_with_the_connection() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    connection: Any = ShuttingDown(ray.exceptions.ActorDiedError())
    outcome = ActorWorker(connection, None, None, 0, lambda handshake: handshake, Callbacks()).wait()
    assert outcome is not None
    assert outcome.ending_text == ENDING_TEXT


def returned(value: object) -> Outcome:
    return Outcome(0, "127.0.0.1", value=pickle.dumps(value))


def task_error(exceptions: Any, cause: Exception) -> Exception:
    """What Ray raises for a task that has raised ``cause``."""
    error = exceptions.RayTaskError("task", "a traceback", cause, "a process", 1, "127.0.0.1")
    both: Exception = error.as_instanceof_cause()
    return both


def ended(group: WorkerGroup[ActorWorker]) -> Outcome:
    """The outcome of the only worker, after its end."""
    outcome = group.workers[0].wait()
    assert outcome is not None
    return outcome


class StubActor:
    """An actor, and what Ray reports about it. The ``ObjectRef`` of a call is the name of its method."""

    has_ended = False

    def __init__(self, exceptions: Any) -> None:
        self.exceptions = exceptions
        self.is_killed = False
        self.lines: queue.Queue[str] = queue.Queue()
        self._numbers: dict[str, int] = {}
        self._changed = threading.Condition()
        self._is_dead = False
        self._channel: Channel | None = None
        self._listener = listen_for_handshakes(SECRET, self._accept, ["127.0.0.1"])
        handshake = ActorHandshake("a" * 56, "127.0.0.1", "one", 1, "b" * 56, (), self._listener.port, 2, "0")
        self._results: dict[str, Any] = {"handshake": handshake, "assign": None}

    def group(self, only_call: ActorCall | None = None) -> WorkerGroup[ActorWorker]:
        """A group of one worker, which is ready."""
        connection: Any = self
        assignment: Any = SimpleNamespace(topology=SimpleNamespace(rank=0, secret=SECRET))

        def start(heard: Callbacks) -> ActorWorker:
            return ActorWorker(connection, self, "handshake", 0, lambda _: assignment, heard, only_call=only_call)

        group: WorkerGroup[ActorWorker] = WorkerGroup()
        group.start([start], Callbacks(on_line=lambda rank, stream, text: self.lines.put(text)))
        group.wait_ready(60)
        return group

    def send(self, message: Message) -> None:
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        assert self._channel is not None
        self._channel.send(data)

    def has_result(self, method: str, result: Any) -> None:
        """Let Ray have the result of a call, or an exception instead of it."""
        with self._changed:
            self._results[method] = result
            self._changed.notify_all()

    def reports_end(self, method: str) -> None:
        """Send the message about the end of a call; Ray has the result soon after it."""
        self.send(CallFinished(self._numbers[method]))

    def dies(self) -> None:
        with self._changed:
            self._is_dead = True
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        self.dies()
        self._listener.close()

    def _accept(self, _handshake: object, channel: Channel) -> bool:
        self._channel = channel
        self.send(OutputLines("stdout", []))
        return True

    # --- the actor's handle, and the package ``ray`` ---

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._start, method))

    def _start(self, method: str, *arguments: Any) -> str:
        if method != "run_call":
            return method
        self._numbers[arguments[1]] = arguments[0]
        return str(arguments[1])

    def ray(self) -> Any:
        return self

    def get(self, ref: str, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: ref in self._results or self._is_dead, timeout):
                raise self.exceptions.GetTimeoutError
            result = self._results[ref] if ref in self._results else self.exceptions.ActorDiedError()
        if isinstance(result, Exception):
            raise result
        return result

    def wait(self, refs: list[str], timeout: float, fetch_local: bool) -> tuple[list[str], list[str]]:
        del timeout, fetch_local
        return [ref for ref in refs if ref in self._results or self._is_dead], []

    def kill(self, handle: object) -> None:
        assert handle is self
        self.is_killed = True
        self.dies()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubActor]:
    package = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    monkeypatch.setattr(actor, "_POLL_S", 0.05)
    one = StubActor(package.exceptions)
    yield one
    one.close()


def test_a_late_message_about_an_earlier_call_does_not_hold_up_the_output_of_the_next(stub: StubActor) -> None:
    group = stub.group()
    worker = group.workers[0]
    worker.submit(ActorCall("first", ()))
    stub.has_result("first", returned(1))
    assert [outcome.value for outcome in group.reports()] == [pickle.dumps(1)]  # found by asking Ray
    worker.submit(ActorCall("second", ()))
    stub.reports_end("first")
    stub.send(OutputLines("stdout", ["epoch 1"]))
    assert stub.lines.get(timeout=60) == "epoch 1"
    stub.has_result("second", returned(2))
    stub.reports_end("second")
    assert [outcome.value for outcome in group.reports()] == [pickle.dumps(2)]


def test_the_error_of_a_task_whose_object_was_returned_is_the_failure_of_the_rank(
    stub: StubActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(outcome: Outcome, worker_id: str) -> Outcome:
        del outcome, worker_id
        raise task_error(stub.exceptions, ValueError("in the task"))

    monkeypatch.setattr(actor, "detached", failing)
    group = stub.group(only_call=ActorCall("perform", ()))
    stub.reports_end("perform")
    stub.has_result("perform", returned("an ObjectRef"))
    outcome = ended(group)
    assert outcome.error is not None
    assert outcome.error.message == "in the task"
    assert stub.is_killed


def test_a_message_that_cannot_be_read_ends_the_worker(stub: StubActor) -> None:
    group = stub.group()
    stub.send_bytes(b"unreadable")
    outcome = ended(group)
    assert outcome.error is not None
    assert outcome.error.type_name == "_pickle.UnpicklingError"
    assert stub.is_killed


@pytest.mark.parametrize("how", ["reported", "not reported"])
def test_a_worker_that_ray_cannot_reach_is_lost_and_ended_although_its_connection_lasts(
    stub: StubActor, how: str
) -> None:
    group = stub.group()
    group.workers[0].submit(ActorCall("perform", ()))
    stub.send(OutputLines("stdout", ["epoch 1"]))
    if how == "reported":
        stub.reports_end("perform")
    stub.has_result("perform", stub.exceptions.ActorUnavailableError("RpcError", b"1" * 16))
    outcome = ended(group)
    assert outcome.ending() == "does not answer: its process or its node was lost"
    assert outcome.output_tail == "epoch 1"
    assert stub.is_killed


def test_what_a_worker_writes_before_its_death_comes_with_its_loss(
    stub: StubActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = stub.group()
    words = ["Fatal Python error"]

    def wait(*_: object, **__: object) -> tuple[list[str], list[str]]:
        if words:  # they arrive while Ray is asked
            stub.send(OutputLines("stderr", [words.pop()]))
        return ["perform"], []

    monkeypatch.setattr(stub, "wait", wait)
    stub.has_result("perform", stub.exceptions.ActorDiedError())
    group.workers[0].submit(ActorCall("perform", ()))
    assert ended(group).output_tail == "Fatal Python error"


@pytest.mark.parametrize(
    ("error", "has_other_nodes", "reason"),
    [
        (FileNotFoundError(2, "No such file or directory", "/data/train.parquet"), False, "no other node to try"),
        (FileNotFoundError(2, "No such file or directory", "/data/train.parquet"), True, ""),
        (ConnectionRefusedError(111, "Connection refused"), False, ""),
        (TimeoutError("no answer"), False, ""),
        (ValueError("wrong"), True, "would do so on any node"),
    ],
)
def test_an_error_before_the_first_world_ends_the_job_if_no_node_can_help(
    error: Exception, has_other_nodes: bool, reason: str
) -> None:
    outcome = Outcome(0, "a", error=ErrorReport.of(error))
    why = fatal_reason(outcome, has_world=False, has_other_nodes=has_other_nodes)
    assert reason in why
    assert bool(why) == bool(reason)


LOSSES = [
    ("ActorPlacementGroupRemoved", (), "ended with its placement group"),
    ("ActorUnschedulableError", ("The node doesn't exist any more.",), "could not be started"),
    ("NodeDiedError", ("Task failed due to the node being dead or unavailable.",), "died with its node"),
    ("OutOfMemoryError", ("Task was killed due to the node running low on memory.",), "was killed by Ray"),
    ("WorkerCrashedError", (), "died: its process was killed"),
]


@pytest.mark.parametrize(("kind", "arguments", "ending_text"), LOSSES)
def test_a_worker_that_ray_has_lost_did_not_raise_what_ray_raises(
    stub: StubActor, kind: str, arguments: tuple[str, ...], ending_text: str
) -> None:
    news = getattr(stub.exceptions, kind)(*arguments)
    group = stub.group()
    group.workers[0].submit(ActorCall("perform", ()))
    stub.reports_end("perform")
    stub.has_result("perform", news)
    stub.has_result("handshake", news)
    for outcome in (ended(group), ended(stub.group())):
        assert ending_text in outcome.ending()
        assert fatal_reason(outcome, has_world=False, has_other_nodes=False) == ""
        with pytest.raises(WorkerFailedError) as raised:
            collect([outcome])
        assert raised.value.died


@pytest.mark.parametrize("kind", ["WorkerCrashedError", "ActorDiedError"])
def test_an_exception_of_a_task_is_not_a_loss_of_the_worker_whatever_it_is(stub: StubActor, kind: str) -> None:
    group = stub.group()
    group.workers[0].submit(ActorCall("perform", ()))
    stub.reports_end("perform")
    stub.has_result("perform", task_error(stub.exceptions, getattr(stub.exceptions, kind)()))
    (outcome,) = group.reports()
    assert outcome.error is not None
    assert outcome.error.type_name == f"ray.exceptions.{kind}"
    assert group.all_live


def test_a_worker_that_dies_between_settling_and_a_call_has_not_answered_the_call(
    stub: StubActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = stub.group()
    (worker,) = group.workers
    actors = ActorGroup(cast("Any", None), Callbacks(), {}, placement_timeout_s=1.0, start_timeout_s=1.0)
    monkeypatch.setattr(actors, "_group", group)
    monkeypatch.setattr(actors, "_connection", stub)
    monkeypatch.setattr(actors, "_running", ExitStack())
    submit = worker.submit

    def submit_late(call: ActorCall) -> None:
        if call.method == "perform":
            stub.dies()
            worker.wait()
        submit(call)
        if call.method == "settle":
            stub.reports_end("settle")

    monkeypatch.setattr(worker, "submit", submit_late)
    stub.has_result("settle", returned(None))
    actors.call_remote(ActorCall("call", ()))
    with pytest.raises(WorkerFailedError) as raised:
        actors.call(ActorCall("perform", ()))
    assert raised.value.died
