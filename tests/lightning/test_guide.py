"""The programs that docs/lightning.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/lightning.md").read_text(), re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.slow


def output_of(program: str, folder: Path, *launcher: str) -> str:
    (folder / "program.py").write_text(program)
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, *([sys.executable] if launcher else []), "program.py"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_there_are_two() -> None:
    assert len(PROGRAMS) == 2


@pytest.mark.parametrize("launcher", [[], ["-m", "hvd_cluster.launch.cli.main", "-np", "2"]], ids=["alone", "hvdrun"])
def test_the_trainer(tmp_path: Path, launcher: list[str]) -> None:
    loss, workers = re.findall(r"loss ([0-9.]+) on (\d) workers", output_of(PROGRAMS[0], tmp_path, *launcher))[0]
    assert float(loss) < 0.1
    assert workers == ("2" if launcher else "1")


def test_the_estimator(tmp_path: Path) -> None:
    printed = output_of(PROGRAMS[1], tmp_path)
    assert "validation_loss" in printed
    assert "y__output" in printed
