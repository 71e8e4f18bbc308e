"""The examples of Spark, as a user runs them; all are in Horovod's spelling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.spark("local")]  # each with a Spark session of its own


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torch_digits", []),
        ("elastic_digits", []),
        ("horovod_runner_digits", ["--np", "2"]),
        ("horovod_runner_digits", ["--np", "-2"]),
        ("keras_estimator_digits", []),
        ("lightning_estimator_digits", []),
    ],
)
def test_an_example_learns_the_digits(name: str, arguments: list[str], tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, ROOT / "examples/spark" / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | env,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(r"accuracy ([0-9.]+) on 2 workers", done.stdout)
    assert len(found) == 1, done.stdout[-2000:]
    assert float(found[0]) > 0.8
    assert len(re.findall(r"epoch \d: loss", done.stdout)) == 5
