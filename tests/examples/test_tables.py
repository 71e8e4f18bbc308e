"""The example of Delta, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_fit_on_a_version_of_a_delta_table(tmp_path: Path) -> None:
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples/torch_delta_table.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | quiet, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "900 rows to train on and 100 to validate on of version 1 of the Delta table" in done.stderr
    assert "version 1 of the Delta table" in done.stdout
