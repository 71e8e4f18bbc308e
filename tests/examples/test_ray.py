"""The examples of Ray, as a user runs them; those with executors are in Horovod's spelling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_clusters import ray_folder

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["torch_digits", "keras_digits", "elastic_digits", "estimator", "train_digits"])
def test_an_example_learns_the_digits(name: str, tmp_path: Path) -> None:
    with ray_folder():
        # A home of its own: Ray keeps the token of a cluster that it starts there.
        env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, ROOT / "examples/ray" / f"{name}.py"],
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
    if name == "keras_digits":
        # The second round goes on where the first one has ended.
        assert re.findall(r"logged \{'epoch': (\d)", done.stdout) == list("01234567")
        first, second = (float(loss) for loss in re.findall(r"round \d: loss ([0-9.]+)", done.stdout))
        assert second < first
    if name == "elastic_digits":
        assert done.stdout.count("logged {'epoch'") == 5
