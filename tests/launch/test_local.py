from __future__ import annotations

import ctypes
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvd_cluster.errors import LaunchError, StartTimeoutError, WorkerFailedError
from hvd_cluster.launch.local import Executor, run
from hvd_cluster.launch.logs import MAX_SHOWN_LINES
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.topology import Topology


def rank() -> int:
    return Topology.from_env().rank


def fail_on_one() -> str:
    if rank() == 1:
        print("about to fail", flush=True)
        raise ValueError("of rank 1")
    time.sleep(300)
    return "never"


def kill_one() -> str:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_results_come_by_rank_and_lines_with_their_prefix() -> None:
    def fn(a: int, b: int = 0) -> tuple[int, int, bool]:
        place = Topology.from_env()
        print("out", place.rank)
        sys.stderr.write("err without newline")
        return place.rank * a + b, place.size, place.secret != b"" and place.rendezvous.startswith("127.0.0.1:")

    out, err = io.StringIO(), io.StringIO()
    assert run(fn, (10,), {"b": 1}, 2, stdout=out, stderr=err) == [(1, 2, True), (11, 2, True)]
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:out 0", "[1]<stdout>:out 1"]
    assert sorted(err.getvalue().splitlines()) == [f"[{r}]<stderr>:err without newline" for r in (0, 1)]


def test_progress_events_reach_the_driver_with_their_rank() -> None:
    def fn() -> None:
        from hvd_cluster.launch.progress import report

        report(done=rank())

    events: list[tuple[int, dict[str, object]]] = []
    run(fn, num_proc=2, on_event=lambda *event: events.append(event))
    assert sorted(events) == [(0, {"done": 0}), (1, {"done": 1})]


def test_verbose_zero_drops_the_lines(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(print, ("quiet please",), verbose=0) == [None]
    assert run(print, ("to be seen",)) == [None]
    assert capfd.readouterr() == ("[0]<stdout>:to be seen\n", "")


@pytest.mark.parametrize("num_proc", [0, -1])
def test_a_job_without_workers_is_refused(num_proc: int) -> None:
    with pytest.raises(ValueError, match=f"num_proc={num_proc} must be a whole number of at least 1"):
        run(rank, num_proc=num_proc)


def test_what_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    before = psutil.Process().num_fds()
    with pytest.raises(LaunchError, match="captured variable 'lock': _thread.lock"):
        run(lambda: lock, num_proc=2)
    assert psutil.Process().num_fds() == before


def test_the_first_failure_stops_the_others_and_begins_with_the_users_traceback() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        run(fail_on_one, num_proc=2, verbose=0)
    assert time.monotonic() - began < 15
    text = str(caught.value)
    assert text.startswith(f'Traceback (most recent call last):\n  File "{__file__}"')
    assert "hvd_cluster/launch" not in text
    assert "Rank 1 on host 127.0.0.1 raised ValueError. Of the others, rank 0 was stopped by the launcher." in text
    assert text.endswith("Last output of rank 1:\n  about to fail")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.slow
@pytest.mark.parametrize("holds_lock", [False, True], ids=["sleeps", "holds the interpreter lock"])
def test_a_rank_that_never_calls_init_is_named_and_its_stack_is_in_the_output(
    holds_lock: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def load_data(holds_lock: bool) -> None:
        (ctypes.PyDLL(None).sleep if holds_lock else time.sleep)(60)

    def train() -> None:
        import hvd_cluster.torch as hvd

        if rank() == 1:
            load_data(holds_lock)
        hvd.init()

    errors = io.StringIO()
    with pytest.raises(
        WorkerFailedError, match=r"not all of the 2 ranks called hvd\.init\(\) within 1 s\. Missing: 1; "
    ):
        run(train, num_proc=2, env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}, stderr=errors)
    line = next(line for line in errors.getvalue().splitlines() if line.endswith(" in load_data"))
    assert line.startswith('[1]<stderr>:  File "')
    assert re.search(
        r"still runs 3 s after the first failure: rank 1 \(process \d+ on 127\.0\.0\.1\)$", caplog.text, re.M
    )


@pytest.mark.parametrize(
    ("end", "exit_code", "words"),
    [
        (lambda: os._exit(5), 5, "exited with code 5"),
        (lambda: os._exit(0), 0, "exited with code 0 before its function returned"),
        (lambda: sys.exit(6), 6, "exited with code 6"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "SIGKILL: killed, perhaps out of memory"),
    ],
)
def test_a_worker_that_ends_instead_of_returning_is_a_failure(end: object, exit_code: int, words: str) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        run(end, verbose=0)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert (caught.value.rank, caught.value.exit_code) == (0, exit_code)


def test_a_survivor_that_notices_the_death_of_a_peer_may_say_so() -> None:
    def fn() -> None:
        from hvd_cluster.errors import HorovodInternalError

        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        raise HorovodInternalError("a peer has gone")

    with pytest.raises(WorkerFailedError) as caught:
        run(fn, num_proc=2, verbose=0)
    assert caught.value.rank == 1
    assert "rank 0 raised hvd_cluster.errors.HorovodInternalError" in str(caught.value)


def test_workers_that_do_not_report_in_time_are_named(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho waiting for a licence\nexec sleep 300\n")
    slow.chmod(0o755)
    with pytest.raises(StartTimeoutError) as caught:
        run(rank, num_proc=2, executable=str(slow), start_timeout=0.5, verbose=0)
    assert re.search(
        r"2 of 2 workers did not start within 0\.5 s: rank 0 \(process \d+ on 127\.0\.0\.1\), "
        r"rank 1 \(process \d+ on 127\.0\.0\.1\)\. ",
        str(caught.value),
    )
    assert "raise start_timeout (now 0.5)" in str(caught.value)
    assert "Last output of rank 1:\n  waiting for a licence" in str(caught.value)


def test_an_executable_that_does_not_exist_is_a_launch_error() -> None:
    with pytest.raises(LaunchError, match="/no/such/python"):
        run(rank, executable="/no/such/python")


def test_two_jobs_at_once_in_one_process_do_not_meet() -> None:
    def fn() -> tuple[str, str, str]:
        place = Topology.from_env()
        return place.job_id, place.rendezvous, place.master

    results: dict[int, list[tuple[str, str, str]]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: run(fn, num_proc=2)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0][0] == results[0][1]
    assert results[1][0] == results[1][1]
    assert not set(results[0][0]) & set(results[1][0])


@pytest.mark.slow
def test_plain_torch_distributed_works_inside_the_function() -> None:
    def fn() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.item()

    assert run(fn, num_proc=2) == [3.0, 3.0]


def test_an_executor_keeps_its_workers_from_call_to_call_and_after_a_failed_one() -> None:
    def one_fails() -> None:
        if rank() == 1:
            raise ValueError("once")

    with Executor(2, verbose=0) as executor:
        pids = executor.run(os.getpid)
        assert executor.run(lambda x: x + rank(), (10,)) == [10, 11]
        with pytest.raises(WorkerFailedError, match="ValueError: once"):
            executor.run(one_fails)
        assert executor.run(os.getpid) == pids
        with pytest.raises(WorkerFailedError, match="SIGKILL"):
            executor.run(kill_one)
        fresh = executor.run(os.getpid)
        assert len({*fresh, *pids}) == 4
    executor.close()


def test_a_worker_that_dies_before_it_takes_a_call_has_not_returned_what_it_returned_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(worker: WorkerProcess, call: bytes) -> None:
        worker.kill()
        worker.wait()
        submit(worker, call)

    submit = WorkerProcess.submit
    with Executor(1) as executor:
        assert executor.run(lambda: "first") == ["first"]
        with monkeypatch.context() as patched:
            patched.setattr(WorkerProcess, "submit", die)
            with pytest.raises(WorkerFailedError):
                executor.run(lambda: "second")
        assert executor.run(lambda: "third") == ["third"]


def test_output_of_a_call_has_been_written_when_an_executor_returns() -> None:
    out = io.StringIO()
    with Executor(2, stdout=out) as executor:
        for call in range(20):
            executor.run(print, (call,))
            assert out.getvalue().count("\n") == 2 * (call + 1)


DRIVER = """
import os, subprocess, sys, time
from collections.abc import Callable
from pathlib import Path
from hvd_cluster.launch.local import run

def fn(folder):
    child = subprocess.Popen(["sleep", "300"])
    rank = os.environ["HOROVOD_RANK"]
    Path(folder, rank + ".tmp").write_text(f"{os.getpid()} {child.pid}")
    Path(folder, rank + ".tmp").rename(Path(folder, rank))
    time.sleep(300)

if __name__ == "__main__":
    run(fn, (sys.argv[1],), num_proc=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_survives_the_driver_not_even_what_the_workers_started(number: int, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    driver = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        wait_until(lambda: all(file.exists() for file in files))
        family = [psutil.Process(int(pid)) for file in files for pid in file.read_text().split()]
        driver.send_signal(number)
        _, errors = driver.communicate(timeout=30)
    finally:
        driver.kill()
        driver.wait()
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_the_output_of_a_call_does_not_count_against_the_next_one(capsys: pytest.CaptureFixture[str]) -> None:
    with Executor(1) as executor:
        executor.run(print, args=["\n" * MAX_SHOWN_LINES])
        executor.run(print, args=["the second call"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MAX_SHOWN_LINES + 2
    assert "verbose=2" in lines[-2]
    assert lines[-1] == "[0]<stdout>:the second call"


@pytest.mark.processes
@pytest.mark.parametrize("launch", [run, Executor(2, verbose=0).run])
def test_an_interrupt_stops_the_workers_and_reaches_the_caller(launch: Callable[..., object]) -> None:
    began = time.monotonic()
    timer = threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        launch(time.sleep, (300,))
    timer.join()
    assert time.monotonic() - began < 20


def test_a_variable_may_be_a_number_and_a_list_is_refused_by_name() -> None:
    assert run(variable, ("NUMBER",), env={"NUMBER": 1}) == ["1"]
    with pytest.raises((TypeError, ValueError), match="LIST"):
        run(rank, env={"LIST": ["a"]})  # type: ignore[dict-item]


def variable(name: str) -> str | None:
    return os.environ.get(name)


def wait_until(condition: object, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
