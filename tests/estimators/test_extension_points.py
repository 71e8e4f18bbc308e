"""Programs that subclass the estimators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.spark("local")  # starts its own session
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
def test_a_client_written_like_synapseml_runs_unchanged(tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, HERE / "scripts/client.py", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("right") > 55
    assert found == {
        "class": "ClassifierModel",
        "columns": ["picture", "kind", "kind__output", "prediction"],
        "vector": ["DenseVector", 2],
        "optimizer": None,
        "epochs": 8,
        "runs": 1,
        "plain": {
            "learnt": True,
            "history": [["all_metrics", "loss"]],
            "columns": ["x", "y", "guess"],
            "checkpoints": 1,
        },
    }
