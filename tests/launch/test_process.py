from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil
import pytest

from hvd_cluster.launch import process
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.topology import Topology

TOPOLOGY = Topology(rank=1, size=2, local_rank=1, local_size=2, secret=b"s" * 32, host="here")


def test_a_worker_runs_its_call_reports_events_and_ends() -> None:
    def fn() -> tuple[str, int]:
        from hvd_cluster.launch.progress import report

        print("from the worker", flush=True)
        report(step=3)
        return os.environ["HOROVOD_RANK"], os.getpid()

    lines: list[object] = []
    events: list[object] = []
    worker = WorkerProcess(
        TOPOLOGY, pack(fn), Callbacks(on_line=lambda *a: lines.append(a), on_event=lambda *a: events.append(a))
    )
    outcome = worker.wait(60)
    assert outcome is not None
    assert outcome.ok
    assert outcome.host == "here"
    assert pickle.loads(outcome.value or b"") == ("1", worker.pid)
    assert lines == [(1, "stdout", "from the worker")]
    assert events == [(1, {"step": 3})]
    assert worker.wait() is outcome


def test_a_named_python_finds_the_modules_of_the_driver_and_its_own_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = str(Path(sysconfig.get_path("purelib"), "of_this_python"))
    (tmp_path / "shipped.py").write_text("NAME = __name__")

    def fn() -> tuple[str, bool]:
        import shipped

        return shipped.NAME, library in sys.path

    monkeypatch.setattr(sys, "path", [str(tmp_path), library, *sys.path])
    worker = WorkerProcess(TOPOLOGY, pack(fn), Callbacks(), executable=sys.executable)
    outcome = worker.wait(60)
    assert outcome is not None
    assert outcome.error is None, outcome.error.traceback_text
    assert pickle.loads(outcome.value or b"") == ("shipped", False)


def test_the_end_of_the_thread_that_started_a_worker_does_not_end_the_worker() -> None:
    workers: list[WorkerProcess] = []
    starter = threading.Thread(target=lambda: workers.append(WorkerProcess(TOPOLOGY, None, Callbacks())))
    starter.start()
    starter.join()
    worker = workers[0]
    assert worker.wait(0.5) is None
    worker.submit(pack(lambda: 1))
    worker.finish()
    outcome = worker.wait(60)
    assert outcome is not None
    assert outcome.ok


def test_a_worker_that_ignores_sigterm_is_killed_and_counts_as_stopped() -> None:
    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(300)

    heard = threading.Event()
    worker = WorkerProcess(TOPOLOGY, pack(deaf), Callbacks(on_line=lambda *_: heard.set()))
    assert heard.wait(60)
    worker.terminate()
    assert worker.wait(0.2) is None
    worker.kill()
    worker.wait()
    assert worker.outcome is not None
    assert (worker.outcome.exit_code, worker.outcome.stopped) == (-signal.SIGKILL, True)


def test_what_a_worker_forked_dies_with_it_and_does_not_hide_its_death() -> None:
    def parent() -> None:
        if os.fork() == 0:
            time.sleep(300)
        print("forked", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    worker = WorkerProcess(TOPOLOGY, pack(parent), Callbacks())
    outcome = worker.wait(60)
    assert outcome is not None
    assert (outcome.exit_code, outcome.output_tail, outcome.stopped) == (-signal.SIGKILL, "forked", False)


def test_a_worker_that_is_stopped_after_its_death_died_by_itself_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def parent() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(300)
        os._exit(3)

    monkeypatch.setattr("hvd_cluster.launch.child._GROUP_GRACE_S", 60.0)
    worker = WorkerProcess(TOPOLOGY, pack(parent), Callbacks())
    deadline_s = time.monotonic() + 60
    while not worker._child.ended_at:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    died_at = time.time()
    time.sleep(0.1)
    worker.terminate()
    worker.kill()
    outcome = worker.wait(60)
    assert outcome is not None
    assert (outcome.exit_code, outcome.stopped) == (3, False)
    assert outcome.finished_at <= died_at


def test_a_worker_without_the_secret_gets_no_call() -> None:
    worker = WorkerProcess(TOPOLOGY, pack(lambda: 1), Callbacks(), env={"_HOROVOD_SECRET_KEY": (b"x" * 32).hex()})
    outcome = worker.wait(60)
    assert outcome is not None
    assert not worker.ready
    assert outcome.exit_code == 1
    assert "AuthenticationError" in outcome.output_tail


def test_the_secret_is_not_on_the_command_line() -> None:
    worker = WorkerProcess(TOPOLOGY, None, Callbacks())
    command = psutil.Process(worker.pid).cmdline()
    worker.finish()
    assert worker.wait(60) is not None
    assert TOPOLOGY.secret.hex() not in " ".join(command)


def test_an_interpreter_that_cannot_run_the_worker_says_why_in_its_tail() -> None:
    worker = WorkerProcess(TOPOLOGY, pack(lambda: 1), Callbacks(), executable="/bin/ls")
    outcome = worker.wait(60)
    assert outcome is not None
    assert outcome.exit_code == 2
    assert "hvd_cluster.launch.worker" in outcome.output_tail


def test_a_module_in_the_current_directory_does_not_hide_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('hidden')")
    (tmp_path / "only_here.py").write_text("VALUE = 5")
    monkeypatch.chdir(tmp_path)

    def read() -> int:
        import random

        assert random.random() < 1
        return int(importlib.import_module("only_here").VALUE)

    worker = WorkerProcess(TOPOLOGY, pack(read), Callbacks())
    outcome = worker.wait(60)
    assert outcome is not None
    assert outcome.ok, outcome.output_tail
    assert outcome.value is not None
    assert pickle.loads(outcome.value) == 5


def test_a_worker_finds_the_modules_that_this_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "beside_the_script.py").write_text("def answer(): return 42")
    import beside_the_script  # type: ignore[import-not-found]

    worker = WorkerProcess(TOPOLOGY, pack(beside_the_script.answer), Callbacks())
    outcome = worker.wait(60)
    del sys.modules["beside_the_script"]
    assert outcome is not None
    assert pickle.loads(outcome.value or b"") == 42


def test_a_worker_imports_nothing_heavy_by_itself() -> None:
    def loaded() -> list[str]:
        return sorted({"torch", "numpy", "pyspark", "pyarrow", "pandas"} & set(sys.modules))

    worker = WorkerProcess(TOPOLOGY, pack(loaded), Callbacks())
    outcome = worker.wait(60)
    assert outcome is not None
    assert pickle.loads(outcome.value or b"") == []


@pytest.mark.parametrize("stream", ["None", "object()", "closed"])
def test_a_function_that_replaced_the_output_has_finished_all_the_same(stream: str) -> None:
    def fn() -> int:
        closed = open(os.devnull, "w")  # noqa: PTH123, SIM115
        closed.close()
        sys.stdout = {"None": None, "object()": object()}.get(stream, closed)  # type: ignore[assignment]
        return 7

    worker = WorkerProcess(TOPOLOGY, pack(fn), Callbacks())
    outcome = worker.wait(60)
    assert outcome is not None
    assert outcome.error is None
    assert pickle.loads(outcome.value or b"") == 7


def test_an_executable_may_be_a_script_that_has_python_as_its_child(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    worker = WorkerProcess(TOPOLOGY, pack(lambda: 7), Callbacks(), executable=str(wrapper))
    outcome = worker.wait(60)
    assert outcome is not None
    assert pickle.loads(outcome.value or b"") == 7


@pytest.mark.parametrize(("end", "exit_code"), [("return", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_process_that_the_function_forks_ends_by_itself_and_says_nothing_in_its_name(
    end: str, exit_code: int
) -> None:
    def fn() -> tuple[str, int] | None:
        pid = os.fork()
        if pid == 0:
            if end != "return":
                exec(end, {"sys": sys})
            return None
        return "the parent's", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    lines: list[str] = []
    outcome = WorkerProcess(TOPOLOGY, pack(fn), Callbacks(on_line=lambda *line: lines.append(line[2]))).wait(60)
    assert outcome is not None
    assert outcome.ok
    assert pickle.loads(outcome.value or b"") == ("the parent's", exit_code)
    assert any("ZeroDivisionError" in line for line in lines) == (exit_code == 1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_the_call_has_left_does_not_keep_its_outcome(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fn() -> str:
        threading.Thread(target=time.sleep, args=(300,)).start()
        if fails:
            raise ValueError("the user's mistake")
        return "the result"

    monkeypatch.setattr(process, "FAILURE_GRACE_S" if fails else "EXIT_GRACE_S", 0.3)
    outcome = WorkerProcess(TOPOLOGY, pack(fn), Callbacks()).wait(60)
    assert outcome is not None
    if fails:
        assert outcome.error is not None
        assert outcome.error.message == "the user's mistake"
    else:
        assert pickle.loads(outcome.value or b"") == "the result"
    assert "rank 1 did not exit within 0.3 s after its call: stopping it" in caplog.text
