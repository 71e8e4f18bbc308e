"""A driver that is interrupted, or killed, leaves no worker behind. Each test has a driver process of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from spark_sessions import executor_folders

pytestmark = pytest.mark.spark

PROGRAM = Path(__file__).parent / "programs" / "driver.py"
#: "Within seconds", on a busy machine.
GONE_S = 15.0


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def _driver(kind: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A driver whose two workers run, and the ids of the workers and of their children."""
    (folder / "spark").mkdir()
    folders = executor_folders()
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, str(PROGRAM), kind, str(folder)], stdout=out, stderr=out)
    try:
        files = [folder / "0.pid", folder / "1.pid"]
        assert _wait(lambda: all(file.exists() for file in files), 90), log.read_text()[-5000:]
        yield process, [int(pid) for file in files for pid in file.read_text().split()]
    finally:
        everything = _children(process)
        process.kill()
        process.wait()
        assert _wait(lambda: not any(map(_lives, everything)), GONE_S)
        for left in executor_folders() - folders:  # nobody was left to remove them
            shutil.rmtree(left, ignore_errors=True)


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_interrupt_stops_the_workers_within_seconds_and_the_session_lives_on(
    spark_master: str, tmp_path: Path
) -> None:
    with _driver(spark_master, tmp_path) as (process, pids):
        process.send_signal(signal.SIGINT)
        assert _wait(lambda: not any(map(_lives, pids)), GONE_S)
        assert _wait((tmp_path / "interrupted").exists, GONE_S), (tmp_path / "log").read_text()[-5000:]
        assert process.wait(90) == 0, (tmp_path / "log").read_text()[-5000:]
        assert (tmp_path / "again").read_text() == "0 1"


@pytest.mark.spark("local-cluster", "connect")
def test_workers_die_with_a_driver_that_is_killed(spark_master: str, tmp_path: Path) -> None:
    with _driver(spark_master, tmp_path) as (process, pids):
        everything = [*pids, *_children(process)]
        process.kill()
        assert _wait(lambda: not any(map(_lives, everything)), GONE_S)
