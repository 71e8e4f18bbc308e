from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_cluster.launch import child, output
from hvd_cluster.launch.child import ChildProcess


class Run:
    """A shell script as a child, its lines and its exit code."""

    def __init__(self, script: str) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.exits: queue.Queue[int | None] = queue.Queue()
        self.child = ChildProcess(
            5,
            ["/bin/bash", "-c", script],
            dict(os.environ),
            on_line=lambda *line: self.lines.append(line),
            on_exit=self.exits.put,
        )
        self.child.start()

    def end(self) -> int | None:
        code = self.exits.get(timeout=30)
        self.child.join()
        return code


def test_output_arrives_in_lines_before_the_exit_code() -> None:
    run = Run("echo one; echo two >&2; printf 'last without newline'; exit 4")
    assert run.end() == 4
    assert sorted(run.lines) == [(5, "stderr", "two"), (5, "stdout", "last without newline"), (5, "stdout", "one")]
    assert "one" in run.child.tail.text()


def test_what_the_child_leaves_behind_is_killed_with_its_group(tmp_path: Path) -> None:
    run = Run(f"trap '' TERM; sleep 300 & echo $! > {tmp_path}/pid; exit 0")
    assert run.end() == 0
    assert gone(int((tmp_path / "pid").read_text()))


_SHARES_MEMORY = """
import os, signal, sys, time
from multiprocessing import Process, shared_memory
memory = shared_memory.SharedMemory(create=True, size=1 << 16)
Process(target=time.sleep, args=(300,), daemon=True).start()  # it holds the pipe to the resource tracker open
print(memory.name, flush=True)
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raises":
    raise ValueError("x")
time.sleep(300)
"""


@pytest.mark.parametrize("end", ["dies", "raises", "is stopped"])
def test_the_shared_memory_of_a_child_ends_with_it(end: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SHARES_MEMORY)
    run = Run(f"exec {sys.executable} {tmp_path}/train.py '{end}'")
    deadline_s = time.monotonic() + 60
    while not run.lines:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    if end == "is stopped":
        run.child.signal(signal.SIGTERM)
    assert run.end() == {"dies": -signal.SIGKILL, "raises": 1, "is stopped": -signal.SIGTERM}[end]
    assert not Path("/dev/shm", run.lines[0][2]).exists()


def test_the_end_of_a_child_is_known_while_what_it_has_left_behind_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_GROUP_GRACE_S", 60.0)
    run = Run("trap '' TERM; sleep 300 & exit 3")
    deadline_s = time.monotonic() + 30
    while not run.child.ended_at:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert run.exits.empty()
    run.child.signal(signal.SIGKILL)
    assert run.end() == 3


def test_a_grandchild_that_escaped_the_group_does_not_delay_the_end(tmp_path: Path) -> None:
    run = Run(f"setsid sleep 60 & echo $! > {tmp_path}/pid; echo done")
    assert run.end() == 0
    assert run.lines == [(5, "stdout", "done")]
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_broken_sink_does_not_stop_the_child(caplog: pytest.LogCaptureFixture) -> None:
    exits: queue.Queue[int | None] = queue.Queue()

    def broken(rank: int, stream: str, line: str) -> None:
        raise RuntimeError("no")

    script = "import sys; sys.stdout.write('x\\n' * 3)"
    child = ChildProcess(0, [sys.executable, "-c", script], dict(os.environ), on_line=broken, on_exit=exits.put)
    child.start()
    assert exits.get(timeout=30) == 0
    child.join()
    assert caplog.text.count("a line of rank 0 could not be passed on") == 3


def test_signals_reach_the_group_and_no_one_after_its_end() -> None:
    run = Run("sleep 300; echo never")
    run.child.signal(signal.SIGTERM)
    assert run.end() == -signal.SIGTERM
    run.child.signal(signal.SIGKILL)
    run.child.catch_up()


def test_a_program_that_does_not_exist_is_an_error_at_the_start() -> None:
    child = ChildProcess(0, ["/no/such/program"], {}, on_line=print, on_exit=print)
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        child.start()


def test_an_exit_code_that_the_kernel_drops_is_not_taken_for_success() -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert Run("exit 7").end() is None
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_an_exit_code_is_known_although_a_handler_reaps_every_child() -> None:
    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    previous = signal.signal(signal.SIGCHLD, reap)
    try:
        assert Run("sleep 0.2; exit 7").end() in {7, None}
    finally:
        signal.signal(signal.SIGCHLD, previous)


@pytest.mark.parametrize("failing", ["dup", "pipe", "reader"])
def test_a_child_whose_output_cannot_be_read_is_an_error_at_the_start_and_ends(
    failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    where = {"dup": (child.os, "dup"), "pipe": (output.os, "pipe"), "reader": (child, "OutputReader")}
    script = f"echo $$ > {tmp_path}/pid; touch {tmp_path}/written; sleep 300"
    process = ChildProcess(0, ["/bin/bash", "-c", script], dict(os.environ), on_line=print, on_exit=print)
    before = len(list(Path("/proc/self/fd").iterdir()))
    fork = subprocess.Popen

    def forked(*arguments: Any, **options: Any) -> Any:
        started = fork(*arguments, **options)
        if "/bin/bash" in arguments[0]:
            while not (tmp_path / "written").exists():
                time.sleep(0.01)
            monkeypatch.setattr(*where[failing], refuse)
        return started

    monkeypatch.setattr(child.subprocess, "Popen", forked)
    with pytest.raises(OSError, match="Too many open files"):
        process.start()
    monkeypatch.undo()
    assert gone(int((tmp_path / "pid").read_text()))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def gone(pid: int, within_s: float = 10.0) -> bool:
    """A process that is dead and reaped, or a zombie that init has yet to reap."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False
