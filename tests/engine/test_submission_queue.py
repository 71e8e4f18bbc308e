"""What is handed to the engine, without ranks: nothing that was handed in is left without an answer."""

import math
import time
from collections.abc import Iterator
from select import poll

import pytest

from hvd_cluster.engine.request import Handle, Request
from hvd_cluster.engine.signature import Kind, ReduceOp, Signature
from hvd_cluster.engine.submission_queue import Leave, SerialNumber, SubmissionQueue
from hvd_cluster.engine.timer import Timer
from hvd_cluster.errors import HorovodInternalError


@pytest.fixture
def submissions() -> Iterator[SubmissionQueue]:
    submissions = SubmissionQueue(0.001)
    yield submissions
    submissions.close()


def test_a_join_that_no_one_has_taken_fails_when_the_world_ends(submissions: SubmissionQueue) -> None:
    handle = Handle()
    submissions.join(handle, -1)
    submissions.command(Leave())
    submissions.end("the world has ended")
    assert handle.done
    with pytest.raises(HorovodInternalError, match="the world has ended"):
        handle.wait()
    assert submissions.take_command() == Leave()
    assert submissions.take_command() is None


def test_a_join_after_the_end_fails_at_once(submissions: SubmissionQueue) -> None:
    submissions.end("the world has ended")
    handle = Handle()
    submissions.join(handle, -1)
    with pytest.raises(HorovodInternalError, match="the world has ended"):
        handle.wait()


def _request(name: str) -> Request:
    signature = Signature(Kind.BARRIER, (), ReduceOp.SUM, -1, 1.0, 1.0)
    return Request(name, 0, signature, [], [], lambda _: None, Handle())


def _ready(timer: Timer, limit_ms: int) -> bool:
    waiting = poll()
    waiting.register(timer.descriptor)
    return bool(waiting.poll(limit_ms))


def test_a_cycle_is_over_when_requests_have_waited_for_company() -> None:
    submissions = SubmissionQueue(0.05)
    submissions.submit(_request("a"), is_waited_for=False)
    assert _ready(submissions.cycle_timer, 1000)
    assert submissions.end_cycle()
    assert not _ready(submissions.cycle_timer, 0)
    submissions.close()


@pytest.mark.long
def test_a_cycle_that_older_requests_have_begun_does_not_end_for_what_was_submitted_just_now() -> None:
    submissions = SubmissionQueue(0.5)
    submissions.submit(_request("a"), is_waited_for=False)
    submissions.take_submitted()  # somebody has waited for it
    assert _ready(submissions.cycle_timer, 10_000)
    submitted_s = time.monotonic()
    submissions.submit(_request("b"), is_waited_for=False)
    assert not submissions.end_cycle()
    assert _ready(submissions.cycle_timer, 10_000)  # it runs again for the new request
    assert time.monotonic() - submitted_s >= 0.5
    assert submissions.end_cycle()
    submissions.close()


def test_a_timer_that_is_started_late_makes_up_for_it() -> None:
    timer = Timer(60)
    timer.start(ago_s=59.95)
    assert _ready(timer, 10_000)
    assert timer.is_due
    timer.close()


def test_a_cycle_that_ends_with_nothing_submitted_begins_again_with_the_next_request() -> None:
    submissions = SubmissionQueue(0.02)
    submissions.submit(_request("a"), is_waited_for=False)
    submissions.take_submitted()
    assert _ready(submissions.cycle_timer, 1000)
    assert submissions.cycle_timer.is_due
    assert not submissions.end_cycle()
    assert not submissions.cycle_timer.is_due
    assert not _ready(submissions.cycle_timer, 100)
    submissions.submit(_request("b"), is_waited_for=False)
    assert _ready(submissions.cycle_timer, 1000)
    assert submissions.end_cycle()
    submissions.close()


def test_a_timer_goes_off_once_for_each_start() -> None:
    timer = Timer(0.001)
    waiting = poll()
    waiting.register(timer.descriptor)
    for _ in range(3):
        assert not waiting.poll(5)
        timer.start()
        assert waiting.poll(1000)
        timer.clear()
    timer.start()
    timer.clear()  # before its time: a later start has to set it off all the same
    timer.start()
    assert waiting.poll(1000)
    timer.close()


def test_an_operation_that_is_interrupted_before_it_is_handed_in_takes_no_number(
    submissions: SubmissionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unnamed() -> Request:
        request = _request("noname")
        request.is_unnamed = True
        return request

    def interrupt(_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SerialNumber, "__str__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            submissions.submit(unnamed(), is_waited_for=True)
    for _ in range(2):
        submissions.submit(unnamed(), is_waited_for=True)
    assert [request.name for request in submissions.take_submitted()] == ["noname.0", "noname.1"]


def test_the_timeout_of_a_held_request_begins_when_the_earlier_one_is_done(submissions: SubmissionQueue) -> None:
    requests = [_request("a") for _ in range(2)]
    for request in requests:
        request.is_ordered, request.timeout_s = True, 5.0
        request.submitted_s -= 4.0
        submissions.submit(request, is_waited_for=False)
    submissions.begin([requests[0].key])
    submissions.finish([requests[0].key])
    now_s = time.monotonic()
    assert submissions.describe_expired(now_s + 4.0) is None
    text = submissions.describe_expired(now_s + 5.5)
    assert text is not None
    assert text.endswith("for other ranks to call a")


def test_a_request_expires_only_while_a_caller_waits_for_it(submissions: SubmissionQueue) -> None:
    since_s = time.monotonic()
    request = _request("a")
    request.timeout_s, request.awaited_since = 5.0, lambda: since_s
    submissions.submit(request, is_waited_for=False)
    begun_s, since_s = since_s, math.inf
    assert submissions.describe_expired(begun_s + 6.0) is None
    assert submissions.expires_s <= begun_s + 11.0
    since_s = begun_s + 7.0
    assert submissions.describe_expired(begun_s + 11.5) is None
    assert submissions.describe_expired(begun_s + 12.5) is not None
