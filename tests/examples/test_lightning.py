"""The example of Lightning, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_under_hvdrun(tmp_path: Path, package: str) -> None:
    if find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}")
    script = tmp_path / "digits.py"
    ours = (ROOT / "examples/lightning_digits.py").read_text()
    script.write_text(ours.replace("import lightning.pytorch as pl", f"import {package} as pl"))
    command = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", sys.executable, str(script)]
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | quiet, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert float(re.findall(r"accuracy ([0-9.]+) on 2 workers", done.stdout)[0]) > 0.85
