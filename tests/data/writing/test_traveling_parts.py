"""The folders in which rows that travel are put together: which of them a task may take for left behind."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from hvd_cluster.data.writing import traveling_parts


def test_a_folder_left_behind_goes_and_one_that_is_just_being_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, made, held = (tmp_path / f"hvd-rows-{name}" for name in ("left", "made", "held"))
    for folder in (left, made, held):
        folder.mkdir()
        (folder / ".lock").touch()
    for folder in (left, held):
        os.utime(folder / ".lock", (time.time() - 3600,) * 2)
    with (held / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with traveling_parts.received([]) as variables:
            assert Path(variables["HOROVOD_ROWS_DIR"]).parent == tmp_path
            assert (left.exists(), made.exists(), held.exists()) == (False, True, True)
