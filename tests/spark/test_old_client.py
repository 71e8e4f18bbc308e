"""A client in the manner of SynapseML's deep-learning module runs unchanged but for one import."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "old_client.py"


@pytest.mark.slow
@pytest.mark.spark("local")
@pytest.mark.timeout(300)
def test_a_client_that_subclasses_backend_estimator_and_model_runs_unchanged(spark_master: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), spark_master, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads((tmp_path / "result").read_text())
    assert found.pop("accuracy") > 0.9
    assert found == {
        "classes": ["DeepModel", "DeepBackend", "Perceptron"],
        "calls": 1,
        "hidden": 16,
        "optimizer": None,
        "output": ["label__output"],
        "vector": "DenseVector",
        "epochs": 5,
    }
