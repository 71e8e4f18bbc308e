"""The examples of TensorFlow and Keras, as a user runs them; and scripts in Horovod's spelling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None or find_spec("keras") is None, reason="needs tensorflow and keras"
)


def accuracy_of(script: Path, *arguments: str, cwd: Path, **env: str) -> float:
    """What the script, on two workers, says in the end."""
    command = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", sys.executable, str(script), *arguments]
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=os.environ | quiet | env, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(r"accuracy ([0-9.]+) on 2 workers", done.stdout)
    assert len(found) == 1, done.stdout[-2000:]
    return float(found[0])


def test_a_tf_function(tmp_path: Path) -> None:
    saved = tmp_path / "model.keras"
    assert accuracy_of(ROOT / "examples/tensorflow_digits.py", "--checkpoint", str(saved), cwd=tmp_path) > 0.7
    assert saved.exists()


def test_a_v1_session_in_horovods_spelling(tmp_path: Path) -> None:
    ours = (ROOT / "examples/tensorflow_v1_session.py").read_text()
    script = tmp_path / "session.py"
    script.write_text(ours.replace("import hvd_cluster.tensorflow as hvd", "import horovod.tensorflow as hvd"))
    shim = str(ROOT / "hvd_cluster/compat/shim")
    path = os.pathsep.join([shim, str(ROOT)])
    assert accuracy_of(script, "--steps", "200", cwd=tmp_path, PYTHONPATH=path) > 0.7


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.slow)])
def test_model_fit_in_either_spelling(tmp_path: Path, backend: str) -> None:
    ours = (ROOT / "examples/keras_digits.py").read_text()
    script = tmp_path / "digits.py"
    old = "horovod.tensorflow.keras" if backend == "tensorflow" else "horovod.keras"
    script.write_text(ours.replace("import hvd_cluster.keras as hvd", f"import {old} as hvd"))
    path = os.pathsep.join([str(ROOT / "hvd_cluster/compat/shim"), str(ROOT)])
    assert accuracy_of(script, cwd=tmp_path, KERAS_BACKEND=backend, PYTHONPATH=path) > 0.7


@pytest.mark.slow
def test_an_elastic_fit(tmp_path: Path) -> None:
    assert accuracy_of(ROOT / "examples/keras_digits_elastic.py", cwd=tmp_path) > 0.8
