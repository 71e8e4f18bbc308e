"""The folders in which rows that travel are put together: which of them a task may take for left behind."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from hvd_cluster.data.writing import part_transfer


def test_a_folder_left_behind_goes_and_one_that_is_just_being_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held = (tmp_path / f"hvd-rows-{name}" for name in ("left", "held"))
    made, given_up = (tmp_path / f"hvd-new-rows-{name}" for name in ("made", "given_up"))
    for folder in (left, held, made, given_up):
        folder.mkdir()
        (folder / ".hvd-scratch").touch()
    (left / "train.part-0.arrow").touch()
    os.utime(given_up, (time.time() - 3600,) * 2)
    with (held / ".hvd-scratch").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with part_transfer.received([]) as variables:
            mine = Path(variables["HOROVOD_ROWS_DIR"])
            assert sorted(tmp_path.iterdir()) == sorted([held, made, mine])
            with part_transfer.received([]):
                assert mine.exists()  # another task of this machine takes it for nothing that is left
    assert sorted(tmp_path.iterdir()) == sorted([held, made])
