"""Folders of killed processes go with the next one that anybody makes; those of the living stay."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from hvd_cluster.data.cache import DiskCache
from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.data.files.store_families import DBFSLocalStore
from hvd_cluster.data.schema import infer
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing.part_file import PartPlan
from hvd_cluster.data.writing.part_transfer import pack_part
from hvd_cluster.spark import encryption


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the machine with nothing in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def tls() -> Iterator[object]:
    with encryption.gloo_variables(b"the job's key"):
        yield


@contextlib.contextmanager
def run_files() -> Iterator[object]:
    with DBFSLocalStore("dbfs:/work").get_local_output_dir_fn("r")() as folder:
        assert list(Path(folder).iterdir()) == []  # all that is in it goes to the run
        yield


@contextlib.contextmanager
def part() -> Iterator[object]:
    table = pa.table({"x": [1.0]})
    folders = {"train_folder": "", "validation_folder": "", "validation": None}
    plan = PartPlan(store=Store.create("/unused"), schema=infer(table.schema), **folders)
    rows = pack_part(plan, 0, table.to_batches())
    next(rows)
    try:
        yield
    finally:
        rows.close()


def killed(scratch: Path, kind: str) -> Path:
    """The folder of a process that was killed."""
    program = (
        "import sys, tempfile\n"
        "from hvd_cluster.data.files.scratch import scratch_folder\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "with scratch_folder(sys.argv[2]) as folder: print(folder, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(scratch), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        with scratch_folder("other"):
            assert folder.is_dir()  # its process lives
        process.send_signal(signal.SIGKILL)
    return folder


@pytest.mark.parametrize("make", [tls, run_files, part])
def test_every_kind_is_locked_and_sweeps_what_the_killed_have_left(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, make: type[contextlib.AbstractContextManager[object]]
) -> None:
    monkeypatch.setattr(encryption, "_gloo_has_tls", lambda: True)
    left = killed(scratch, "tls")
    (left / "job.pem").touch()
    with make():
        (mine,) = scratch.iterdir()
        assert mine != left
        assert mine.stat().st_mode & 0o077 == 0
        with (mine / ".hvd-scratch").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(scratch.iterdir()) == []


def test_a_users_disk_cache_beside_them_stays(scratch: Path) -> None:
    DiskCache(scratch / "hvd-cache", 1 << 20).get(("a", 0, ("x",), (), None), lambda: pa.table({"x": [1.0]}))
    files = sorted((scratch / "hvd-cache").iterdir())
    assert len(files) == 2
    with scratch_folder("run"):
        assert sorted((scratch / "hvd-cache").iterdir()) == files


def test_a_filesystem_without_locks_serves_too(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with scratch_folder("run") as folder, scratch_folder("run"):
        assert Path(folder).is_dir()
    assert list(scratch.iterdir()) == []
