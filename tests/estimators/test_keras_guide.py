"""The program that docs/keras-estimator.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
[PROGRAM] = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs/keras-estimator.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("keras") is None, reason="needs keras")
def test_the_keras_guide_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"; Python \S+, keras \d\S+, torch \d\S+;", done.stderr)
    assert "ran out of data" not in done.stderr
    accuracies = [float(number) for number in re.findall(r"[0-9.]+", done.stdout.splitlines()[0])]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.8
    assert "label__output" in done.stdout
    assert (tmp_path / "work/runs/first/checkpoint.keras").exists()
