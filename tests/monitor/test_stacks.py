"""What a thread is doing: lines of the user, with what they call of libraries folded."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.monitor.stacks import process_state, user_stack


def stack_within(call: Callable[[], object]) -> str:
    """The stack of the main thread while it is in ``call``."""
    stacks: queue.SimpleQueue[str] = queue.SimpleQueue()
    thread = threading.Timer(0.3, lambda: stacks.put(user_stack()))
    thread.start()
    call()
    thread.join()
    return stacks.get()


def test_the_line_of_the_user_comes_first_with_the_library_call_that_it_waits_in() -> None:
    def train() -> None:
        with pytest.raises(queue.Empty):
            queue.Queue().get(timeout=1.0)

    lines = stack_within(train).splitlines()
    here = Path(__file__).relative_to(Path.cwd())
    assert lines[0].startswith(f"{here}:")
    assert lines[0].endswith(".<locals>.train: queue.Queue().get(timeout=1.0)")
    assert lines[1].startswith("    in Queue.get (queue.py:")
    assert " ... Condition.wait (threading.py:" in lines[1]
    assert lines[2].endswith("in stack_within: call()")


def test_a_deep_recursion_is_cut() -> None:
    def descend(depth: int) -> None:
        time.sleep(0.6) if depth == 0 else descend(depth - 1)

    lines = stack_within(lambda: descend(30)).splitlines()
    assert len(lines) == 7
    assert lines[-1].startswith("... and 2")


def test_the_thread_that_submits_is_shown_if_only_it_runs_code_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    idle = threading.Thread(target=release.wait)
    idle.start()
    try:
        monkeypatch.setattr(threading, "main_thread", lambda: idle)
        assert user_stack().startswith("    in Thread._bootstrap (threading.py:")
        (own,) = user_stack(threading.get_ident()).splitlines()
        assert own.endswith(": (own,) = user_stack(threading.get_ident()).splitlines()")
    finally:
        release.set()
    idle.join()


def test_a_module_whose_source_cannot_be_read_spoils_only_the_stack() -> None:
    class Loader:
        def get_source(self, _: str) -> str:
            raise RuntimeError("encrypted")

    namespace = {"__loader__": Loader(), "__name__": "secret", "stack": user_stack}
    exec(compile("def run():\n    return stack()\n", "/models/secret.py", "exec"), namespace)
    run: Any = namespace["run"]
    assert run() == "(its stack cannot be shown: RuntimeError: encrypted)"


def test_a_working_directory_that_is_gone_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert f"{__file__}:" in user_stack().splitlines()[0]


def test_the_kernel_knows_why_a_process_does_not_answer() -> None:
    with subprocess.Popen(["sleep", "30"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        while "stopped" not in process_state(process.pid):
            time.sleep(0.01)
        process.kill()
    assert process_state(process.pid) == "it has ended"


def test_a_function_of_the_user_that_keeps_a_reader_busy_is_named() -> None:
    release = threading.Event()

    def prepare() -> None:
        release.wait()

    readers = [threading.Thread(target=target, name="hvd-reader-0") for target in (prepare, release.wait)]
    for reader in readers:
        reader.start()
    try:
        lines = stack_within(lambda: time.sleep(0.6)).splitlines()
    finally:
        release.set()
    here = Path(__file__).relative_to(Path.cwd())
    (line,) = [line for line in lines if line.startswith("hvd-reader-0 is in ")]
    assert f"<locals>.prepare ({here}:" in line
