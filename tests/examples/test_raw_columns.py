"""The examples of raw columns: strings, JPEG bytes and a table of forty columns, on a local Spark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "raw_columns"

pytestmark = [pytest.mark.slow, pytest.mark.spark("local")]  # each with a Spark session of its own


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "data"))
def test_an_example_learns_from_raw_columns(name: str, tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | env,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ((what, number),) = re.findall(r"^(right|error): ([0-9.e-]+)$", done.stdout, re.MULTILINE)
    assert float(number) > 0.9 if what == "right" else float(number) < 0.6
