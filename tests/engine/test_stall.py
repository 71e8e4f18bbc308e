"""The stall inspector on real ranks: one warning that names who is missing and what they do, then an end."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_cluster.engine.launched_work import Launch, LaunchedWork
from hvd_cluster.engine.messages import StallLimit, StallReport, Wait
from hvd_cluster.engine.request import Handle, Request
from hvd_cluster.engine.signature import Kind, Signature
from hvd_cluster.engine.stall import StallInspector
from hvd_cluster.engine.submission_queue import SubmissionQueue
from hvd_cluster.engine.tree import tree_positions
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local
from hvd_cluster.settings import Settings

ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}


def test_one_warning_names_the_missing_rank_and_what_it_did_last() -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(1), name="together")
        # Rank 1 finds that it waits just after rank 0 has asked, and that longer than it waits for a root that is gone.
        time.sleep([0, 0.05, 6.8][hvd.rank()])
        hvd.allreduce(torch.ones(1), name="late")
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, num_proc=3, env=ENV, stderr=errors)
    text = errors.getvalue()
    assert text.count("One or more tensors were submitted to be reduced, gathered or broadcasted by subset") == 1
    assert "for more than 1 seconds" in text
    assert "does not answer" not in text
    assert "2: [allreduce.late] - rank 2 on 127.0.0.1 last submitted allreduce.together, " in text
    missing, waiting = text.split("Rank 0 waits at:")
    assert "in test_one_warning_names_the_missing_rank_and_what_it_did_last.<locals>.fn: time.sleep([" in missing
    assert 'hvd.allreduce(torch.ones(1), name="late")' in waiting
    assert "user_stack" not in waiting
    assert "<string>" not in text, "how a worker starts is not code of the user"


def test_ranks_that_wait_for_each_other_are_in_one_warning() -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            hvd.allreduce(torch.ones(1), name="accuracy")
        hvd.allreduce(torch.ones(1), name="loss")
        time.sleep(3)
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="accuracy")
        hvd.shutdown()

    errors = io.StringIO()
    with pytest.raises(WorkerFailedError):
        local.run(fn, num_proc=2, env=ENV | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}, stderr=errors)
    warning, _, _ = errors.getvalue().partition("Will shutdown")
    assert warning.count("One or more tensors were submitted to be reduced, gathered or broadcasted by subset") == 1
    assert "0: [allreduce.accuracy] - rank 0 on 127.0.0.1 last submitted allreduce.loss, " in warning
    assert "1: [allreduce.loss] - rank 1 on 127.0.0.1 last submitted allreduce.accuracy, " in warning


@pytest.mark.slow
def test_a_rank_that_hangs_after_a_join_is_named() -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.join()
        time.sleep(4 * hvd.rank())
        hvd.allreduce(torch.ones(1), name="next epoch")
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, num_proc=2, env=ENV, stderr=errors)
    assert "1: [allreduce.next epoch] - rank 1 on 127.0.0.1 last submitted join, " in errors.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 2])
def test_a_rank_that_waits_in_a_join_has_the_hanging_rank_named_and_no_other(others: int) -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        for step in range([0, 12, 12][hvd.rank()]):  # the others have more batches: this is no alarm
            time.sleep(0.2)
            hvd.allreduce(torch.ones(1), name=f"step {step}")
        if hvd.rank() == hvd.size() - 1:
            time.sleep(4)  # the last to arrive
        elif hvd.rank() == 1:
            hvd.allreduce(torch.ones(1), name="waiting itself")
        hvd.join()
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, num_proc=1 + others, env=ENV, stderr=errors)
    text = errors.getvalue()
    named = re.findall(r":(\d): \[(.*)\] - rank", text)
    assert {rank for rank, _ in named} == {str(others)}
    assert any("join" in operations for _, operations in named)
    assert "time.sleep(4)" in text


@pytest.mark.slow
def test_a_rank_that_never_joins_ends_the_job_after_the_second_time() -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        time.sleep(8 * hvd.rank())
        hvd.join()

    with pytest.raises(WorkerFailedError, match=r"1!: \[join\] - rank 1 .* has submitted nothing yet"):
        local.run(fn, num_proc=2, env={**ENV, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}, stderr=io.StringIO())


@pytest.mark.parametrize(
    ("victim", "start"),
    [
        (0, "Rank 1 has waited for [allreduce.waiting]"),
        (1, "1: [allreduce.waiting] - rank 1 on 127.0.0.1 does not answer"),
    ],
    ids=["root", "another rank"],
)
@pytest.mark.slow
def test_a_rank_that_is_stopped_is_said_not_to_answer(victim: int, start: str) -> None:
    def fn(victim: int) -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.barrier()
        if hvd.rank() == victim:
            subprocess.Popen(["sh", "-c", f"sleep 9; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        hvd.allreduce(torch.ones(1), name="waiting")
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, (victim,), num_proc=2, env=ENV, stderr=errors)
    text = errors.getvalue()
    assert start in text
    assert (
        f"rank {victim} on 127.0.0.1 does not answer: it is stopped (SIGSTOP or SIGTSTP); it last took part in " in text
    )
    assert f"Rank {1 - victim} waits at:" in text
    assert 'hvd.allreduce(torch.ones(1), name="waiting")' in text


def test_after_the_second_time_the_job_ends_with_the_same_text() -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            time.sleep(6)
            with pytest.raises(hvd.HorovodInternalError, match="Will shutdown"):
                hvd.allreduce(torch.ones(1), name="too late")
        hvd.allreduce(torch.ones(1), name="early")

    with pytest.raises(WorkerFailedError, match=r"1!: \[allreduce\.early\] - rank 1 .* has submitted nothing yet"):
        local.run(fn, num_proc=2, env={**ENV, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}, stderr=io.StringIO())


#: For ten minutes: LONG_STEPS=30 pytest -m slow FILE
LONG_STEPS = int(os.environ.get("LONG_STEPS", "4"))


@pytest.mark.slow
@pytest.mark.timeout(LONG_STEPS * 25 + 60)
def test_steps_of_20_s_cause_no_alarm_with_default_knobs() -> None:
    """Whether all ranks need the time or one, and whether it releases the interpreter lock or not."""

    def fn(steps: int) -> None:
        import ctypes

        import hvd_cluster.torch as hvd

        hvd.init()
        for step in range(steps):
            if step % 3 == 0 or hvd.rank() == step % 2:
                (time.sleep if step % 4 < 2 else ctypes.PyDLL(None).sleep)(20)
            hvd.allreduce(torch.ones(1), name="gradient")
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, (LONG_STEPS,), num_proc=2, env={"OMP_NUM_THREADS": "1"}, stderr=errors)
    assert errors.getvalue() == ""


@pytest.mark.slow
def test_it_can_be_switched_off() -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            time.sleep(2.5)
        hvd.barrier()
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, num_proc=2, env={**ENV, "HOROVOD_STALL_CHECK_DISABLE": "1"}, stderr=errors)
    assert "One or more tensors" not in errors.getvalue()


@pytest.mark.slow
def test_a_rank_inside_a_c_call_that_holds_the_interpreter_lock_does_not_answer() -> None:
    def fn() -> None:
        import ctypes

        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(1), name="together")
        if hvd.rank() == 1:
            ctypes.PyDLL(None).sleep(6)  # unlike CDLL, it keeps the lock
        hvd.allreduce(torch.ones(1), name="waiting")
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, num_proc=2, env=ENV, stderr=errors)
    assert (
        "rank 1 on 127.0.0.1 does not answer: it is inside a C call that holds Python's interpreter lock; "
        "it last took part in allreduce.together, "
    ) in errors.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_rank_that_stops_in_the_middle_of_an_operation_is_named_before_the_time_limit(shared_memory: str) -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.transports.chunks import Arithmetic
        from hvd_cluster.engine.transports.gloo import GlooTransport

        hvd.init()
        hvd.allreduce(torch.ones(1), name="together")
        if hvd.rank() == 1:

            def stop(*_: object) -> None:
                subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)

            for owner, method in [(Arithmetic, "fill"), (GlooTransport, "allreduce")]:
                original = getattr(owner, method)
                setattr(owner, method, lambda *args, original=original: (stop(), original(*args))[1])
        total = hvd.allreduce(torch.ones(1 << 20), name="gradient", op=hvd.Sum)
        assert total.unique().tolist() == [2.0]
        hvd.shutdown()

    errors = io.StringIO()
    local.run(fn, num_proc=2, env=ENV | {"HOROVOD_SHARED_MEMORY": shared_memory}, stderr=errors)
    text = errors.getvalue()
    assert "[allreduce.gradient]" in text
    assert "it is stopped (SIGSTOP or SIGTSTP)" in text
    assert 'hvd.allreduce(torch.ones(1 << 20), name="gradient", op=hvd.Sum)' in text


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_only_the_rank_that_stops_in_an_operation_is_said_not_to_answer_and_all_ranks_end(num_hosts: int) -> None:
    """The last rank stops in an operation of a set that rank 0 is not in, or of a hierarchy of hosts."""

    def fn(num_hosts: int) -> tuple[str, float]:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import world
        from hvd_cluster.engine.transports.chunks import Arithmetic

        rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
        world.host_key = lambda: f"host {num_hosts * rank // size}"
        some = hvd.ProcessSet(range(num_hosts % 2, size))
        hvd.init(process_sets=[some] if num_hosts == 1 else [])
        pids = hvd.allgather_object(os.getpid())
        if rank == size - 1:
            fill = Arithmetic.fill

            def stop(*args: Any) -> None:
                Arithmetic.fill = fill  # type: ignore[method-assign]
                os.kill(os.getpid(), signal.SIGSTOP)
                fill(*args)

            Arithmetic.fill = stop  # type: ignore[method-assign, assignment]
        start_s = time.monotonic()
        try:
            if num_hosts > 1:
                hvd.allreduce(torch.ones(1 << 20), name="inner")
            elif rank > 0:
                hvd.allreduce(torch.ones(1 << 20), name="inner", process_set=some)
            hvd.allreduce(torch.ones(1), name="outer")
        except hvd.HorovodInternalError as error:
            return str(error), time.monotonic() - start_s
        finally:
            if rank == 0:
                os.kill(pids[-1], signal.SIGCONT)
        return "", 0.0

    errors = io.StringIO()
    env = ENV | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    ends = local.run(fn, (num_hosts,), num_proc=2 + num_hosts, env=env, stderr=errors)
    text = errors.getvalue()
    victim = 1 + num_hosts
    for end, duration_s in ends:
        assert "is stalled for longer than 4 seconds. Will shutdown." in end
        assert f"{victim}! on 127.0.0.1" in end or f"{victim}!: [allreduce." in end
        assert duration_s < 15
    assert set(re.findall(r"rank (\d) on \S+ does not answer", text)) == {str(victim)}
    stopped = f"for rank {victim} on 127.0.0.1 (it is stopped (SIGSTOP or SIGTSTP))"
    if num_hosts == 1:
        assert "1: [allreduce.outer] - rank 1 on 127.0.0.1 last submitted allreduce.inner, " in text
        assert f"; it waits in the middle of [allreduce.inner (process set 1)] {stopped}; process" in text
        assert 'hvd.allreduce(torch.ones(1 << 20), name="inner", process_set=some)' in text
    else:
        assert f"Rank 2 has waited for 1 seconds in the middle of [allreduce.inner] {stopped}" in text


def inspector_of(
    settings: Settings, process_sets: dict[int, tuple[int, ...]], rank: int = 0, **more: Any
) -> StallInspector:
    positions = tree_positions(["a", "b"])
    world: Any = SimpleNamespace(
        topology=SimpleNamespace(rank=rank),
        hosts=["a", "b"],
        pids=[0, 0],
        tree_position=positions[rank],
        host_keys=["a", "b"],
    )
    calls: dict[str, Any] = dict.fromkeys(("send_up", "send_down", "abort"), lambda *_: None)
    calls |= {"submissions": SubmissionQueue(0.001), "launched_work": LaunchedWork(settings), **more}
    return StallInspector(world, process_sets, settings, **calls)


def test_a_second_report_of_a_limit_is_answered_with_the_query_that_is_open() -> None:
    sent: list[Any] = []
    settings = Settings()
    inspector = inspector_of(settings, {0: (0, 1)}, send_down=sent.append)
    for name in ("first", "second"):
        inspector.receive(StallReport((Wait((0, name), 1),), StallLimit.TIMEOUT))
    assert [query.waits[0].key[1] for query in sent] == ["first", "first"]
    inspector._submissions.close()


@pytest.mark.parametrize("is_late", [False, True], ids=["completed while the root asks", "still missing"])
def test_no_rank_is_blamed_for_what_is_complete_when_the_root_asks(
    is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    up: list[Any] = []
    down: list[Any] = []
    settings = replace(Settings(), stall_warning_s=0.05)
    root = inspector_of(settings, {0: (0, 1)}, send_down=down.append)
    other = inspector_of(settings, {0: (0, 1)}, rank=1, send_up=up.append)
    inspectors = (root, other)

    def decide(name: str) -> None:
        for inspector in inspectors:
            submissions = inspector._submissions
            submissions.num_decisions += 1
            submissions.begin([(0, name)])
            submissions.finish([(0, name)])

    decide("gradient")  # in an earlier step
    request = Request("gradient", 0, Signature(Kind.BARRIER), [], [], lambda results: results, Handle())
    other._submissions.submit(request, is_waited_for=True)
    time.sleep(0.1)
    other.inspect()
    root.receive(up.pop())
    if not is_late:
        decide("gradient")
    time.sleep(0.4)
    root.inspect()
    other.receive(down.pop())
    root.receive(up.pop())
    root.inspect()
    assert ("0: [gradient]" in caplog.text) == is_late
    assert "1: [gradient]" not in caplog.text
    for inspector in inspectors:
        inspector._submissions.close()


def test_names_of_old_decisions_are_forgotten() -> None:
    submissions = SubmissionQueue(0.001)
    for number in range(20_000):
        submissions.num_decisions += 1
        submissions.begin([(0, f"allreduce.noname.{number}")])
    assert submissions.has_decided((0, "allreduce.noname.19000"), 18_000)
    assert not submissions.has_decided((0, "allreduce.noname.19000"), 19_001)
    assert len(submissions._decided) + len(submissions._decided_before) < 9_000
    submissions.close()


def test_what_was_reported_is_not_checked_again_at_once_although_launched_work_is_older() -> None:
    settings = replace(Settings(), stall_warning_s=0.01, stall_shutdown_s=0.02)
    inspector = inspector_of(settings, {0: (0, 1)})
    inspector._launched_work.add(1, [(0, "launched")], Launch([], [], None))
    time.sleep(0.005)
    signature = Signature(Kind.BARRIER)
    inspector._submissions.submit(
        Request("pending", 0, signature, [], [], lambda results: results, Handle()), is_waited_for=True
    )
    time.sleep(0.03)
    inspector.inspect()
    (open_query,) = inspector._queries
    assert open_query.query.limit == StallLimit.SHUTDOWN
    open_query.deadline_s += 60
    check_s = inspector.next_check_s()
    assert check_s is not None
    assert check_s > time.monotonic()
    inspector._submissions.close()


def test_what_was_warned_of_is_forgotten_when_it_may_be_warned_of_again() -> None:
    inspector = inspector_of(replace(Settings.from_env(), stall_warning_s=1e-6), {0: (0, 1)})
    for number in range(100):
        waits = (Wait((0, f"allreduce.noname.{number}")),)
        inspector.receive(StallReport(waits, StallLimit.CHECK))
        time.sleep(1e-4)
    assert len(inspector._warned) == 1
    inspector._submissions.close()
