"""Fails a test that leaves something behind.

Watched are the environment, threads, processes (orphans too, told by a variable that every descendant inherits), files
in ``/dev/shm``, files in the temporary folder (this run has its own) and torch.distributed's default group. What a
module- or session-scoped fixture starts belongs to that fixture, not to the test that happened to ask first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

SESSION_VARIABLE = "HVD_CLUSTER_TEST_SESSION"
GRACE_S = 3.0
HERE = str(Path(__file__).parents[2]) + os.sep

#: Written by third parties when they are first imported or started.
FOREIGN_VARIABLES = (
    "PYTEST_",
    "KMP_",
    "SPARK_",
    "PYSPARK_",
    "TORCHINDUCTOR_",
    "TF_",
    "TF2_",
    "RAY_",
    "GRPC_",
    "COVERAGE",
    "CRC32C_",
    "TPU_",  # TensorFlow's and JAX's, as the next
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",  # h5py's, which Keras imports
)
#: Threads of these packages serve a whole process, not one call. The last one is ours: it watches all reads and writes.
FOREIGN_THREADS = (
    *("py4j", "pyspark", "grpc", "tqdm", "pytest_timeout", "torch._inductor", "ray."),
    "hvd_cluster.monitor.activities",
)
#: Processes that outlive one call by design: Spark's Python daemons and JVMs, multiprocessing's trackers, Ray's nodes
#: and the workers that it keeps for the next task (the fixture ``ray_cluster`` looks for actors of ours).
FOREIGN_PROCESSES = (
    *("pyspark.daemon", "pyspark/daemon.py", "java", "resource_tracker", "forkserver"),
    *("site-packages/ray/", "-m ray.", "ray::"),
)
FOREIGN_FILES = (
    "spark-",
    "blockmgr-",
    "hsperfdata",
    "torchinductor_",
    "matplotlib-",
    "liblz4",
    "libzstd",
    "snappy-",
    "artifacts-",
    "__autograph_generated_file",  # TensorFlow's, and its bytecode
    "__pycache__",
)


@dataclass
class Residue:
    """What exists at one moment, by a name for people."""

    variables: dict[str, str] = field(default_factory=dict)
    threads: dict[threading.Thread, str] = field(default_factory=dict)
    processes: dict[psutil.Process, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)

    @classmethod
    def now(cls) -> Residue:
        return cls(
            variables=dict(os.environ),
            threads={thread: f"{thread.name} {_module(thread)}" for thread in threading.enumerate()},
            processes=dict(processes()),
            files={str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("*")},
            groups=_groups(),
        )

    def absorb(self, before: Residue, after: Residue) -> None:
        """Take what came between ``before`` and ``after`` as given from now on."""
        for name in {**before.variables, **after.variables}:
            if before.variables.get(name) != after.variables.get(name):
                if name in after.variables:
                    self.variables[name] = after.variables[name]
                else:
                    self.variables.pop(name, None)
        self.threads.update(after.threads)
        self.processes.update(after.processes)
        self.files |= after.files
        self.groups |= after.groups


_baseline = Residue()


def pytest_configure(config: pytest.Config) -> None:
    os.environ[SESSION_VARIABLE] = secrets.token_hex(8)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="hvd-test-")


def pytest_unconfigure(config: pytest.Config) -> None:
    for process, _ in _new_processes(Residue(), Residue.now()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    tempfile.tempdir = None


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    before = Residue.now()
    try:
        return (yield)
    finally:
        _baseline.absorb(before, Residue.now())


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    global _baseline
    _baseline = Residue.now()
    yield
    spark = request.node.get_closest_marker("spark") is not None
    deadline = time.monotonic() + GRACE_S
    while leaks := _leaks(_baseline, Residue.now(), spark):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if leaks:
        _restore_environment(_baseline)
        pytest.fail("this test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _leaks(before: Residue, after: Residue, spark: bool) -> list[str]:
    found = [
        f"variable {name}: {before.variables.get(name)!r} -> {after.variables.get(name)!r}"
        for name in sorted({**before.variables, **after.variables})
        if before.variables.get(name) != after.variables.get(name) and not name.startswith(FOREIGN_VARIABLES)
    ]
    found += [
        f"thread {text}"
        for thread, text in after.threads.items()
        if thread not in before.threads and thread.is_alive() and not _foreign_thread(thread, spark)
    ]
    found += [f"process {text}" for _, text in _new_processes(before, after)]
    found += [f"file {path}" for path in sorted(after.files - before.files) if not _foreign_file(path, spark)]
    found += [f"process group {name}" for name in sorted(after.groups - before.groups)]
    return found


def _restore_environment(before: Residue) -> None:
    """Later tests must not fail for what this one set. (Its processes stay until the end: a fixture may own them.)"""
    for name in {**before.variables, **os.environ}:
        if name.startswith(FOREIGN_VARIABLES):
            continue
        if name in before.variables:
            os.environ[name] = before.variables[name]
        else:
            os.environ.pop(name, None)


def processes() -> Iterator[tuple[psutil.Process, str]]:
    """Every live descendant of this test session, orphans included."""
    for pid in psutil.pids():
        if pid == os.getpid() or not _is_ours(pid):
            continue
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process, f"{pid}: {' '.join(process.cmdline())[:200]}"
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    for process in psutil.Process().children() if _has_zombie() else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                yield process, f"{process.pid}: a child that nobody waited for"


def _is_ours(pid: int) -> bool:
    """Whether a process inherited this session's variable. Read raw: what psutil does took a tenth of all time."""
    try:
        with Path(f"/proc/{pid}/environ").open("rb", buffering=0) as environ:
            return f"{SESSION_VARIABLE}={os.environ.get(SESSION_VARIABLE)}\0".encode() in environ.readall()
    except OSError:
        return False


def _has_zombie() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _new_processes(before: Residue, after: Residue) -> list[tuple[psutil.Process, str]]:
    return [
        (process, text)
        for process, text in after.processes.items()
        if process not in before.processes and not any(mark in text for mark in FOREIGN_PROCESSES)
    ]


def _foreign_thread(thread: threading.Thread, spark: bool) -> bool:
    """Not ours: a foreign package's, or (beside Spark) one whose stack shows no line of this repository."""
    if _module(thread).startswith(FOREIGN_THREADS) or isinstance(thread, threading._DummyThread):
        return True
    if not spark:
        return False
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.startswith(HERE) and "site-packages" not in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return True


def _module(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None) or type(thread)
    return str(getattr(target, "__module__", "") or "")


def _foreign_file(path: str, spark: bool) -> bool:
    name = Path(path).name
    if path.startswith("/dev/shm/"):  # what we and multiprocessing leave there are files
        return Path(path).is_dir() or _used_by_others(path)
    return name.startswith(FOREIGN_FILES) or (spark and not name.startswith(("hvd", "horovod")))


def _used_by_others(path: str) -> bool:
    """A process outside this test session holds the file open or mapped, or it is gone: it is not ours."""
    try:
        # By its number: a semaphore is mapped under the name that it had for a moment.
        number = str(Path(path).stat().st_ino)
    except FileNotFoundError:
        return True
    for process in psutil.process_iter():
        try:
            if process.environ().get(SESSION_VARIABLE) == os.environ[SESSION_VARIABLE]:
                continue
            held = {os.path.realpath(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
            mapped = [line.split(maxsplit=5) for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
            if path in held or any(line[4] == number and line[-1].startswith("/dev/shm/") for line in mapped):
                return True
        except (psutil.Error, OSError):
            continue
    return False


def _groups() -> set[str]:
    distributed = sys.modules.get("torch.distributed")
    return {"torch.distributed's default group"} if distributed is not None and distributed.is_initialized() else set()
