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
#: A PYTHONPATH with this package, and one on which ``import horovod`` is this package.
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests/startup")])
OLD_PATHS = os.pathsep.join([str(ROOT / "hvd_cluster/compat/shim"), PATHS])

pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None or find_spec("keras") is None, reason="needs tensorflow and keras"
)


def accuracy_of(script: Path, *arguments: str, cwd: Path, **env: str) -> float:
    """What the script, on two workers, says in the end."""
    command = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", sys.executable, str(script), *arguments]
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": PATHS}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=os.environ | quiet | env, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(r"accuracy ([0-9.]+) on 2 workers", done.stdout)
    assert len(found) == 1, done.stdout[-2000:]
    return float(found[0])


def in_horovods_spelling(example: str, module: str, folder: Path) -> Path:
    """A copy of an example that imports ``module`` as hvd; run it with ``PYTHONPATH=OLD_PATHS``."""
    script = folder / "script.py"
    text, count = re.subn(r"import hvd_cluster\.\S+ as hvd", f"import {module} as hvd", (ROOT / example).read_text())
    assert count == 1
    script.write_text(text)
    return script


@pytest.mark.parametrize("spelling", ["horovod.tensorflow", pytest.param("ours", marks=pytest.mark.slow)])
def test_a_tf_function(tmp_path: Path, spelling: str) -> None:
    script = ROOT / "examples/tensorflow_digits.py"
    if spelling != "ours":
        script = in_horovods_spelling("examples/tensorflow_digits.py", spelling, tmp_path)
    saved = tmp_path / "model.keras"
    assert accuracy_of(script, "--checkpoint", str(saved), cwd=tmp_path, PYTHONPATH=OLD_PATHS) > 0.7
    assert saved.exists()


@pytest.mark.slow
def test_a_v1_session_in_horovods_spelling(tmp_path: Path) -> None:
    script = in_horovods_spelling("examples/tensorflow_v1_session.py", "horovod.tensorflow", tmp_path)
    assert accuracy_of(script, "--steps", "200", cwd=tmp_path, PYTHONPATH=OLD_PATHS) > 0.7


@pytest.mark.parametrize(
    "backend", ["tensorflow", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "jax"))]
)
def test_model_fit_in_either_spelling(tmp_path: Path, backend: str) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    module = "horovod.tensorflow.keras" if backend == "tensorflow" else "horovod.keras"
    script = in_horovods_spelling("examples/keras_digits.py", module, tmp_path)
    assert accuracy_of(script, cwd=tmp_path, KERAS_BACKEND=backend, JAX_PLATFORMS="cpu", PYTHONPATH=OLD_PATHS) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["hvd_cluster.keras", "horovod.keras", "horovod.tensorflow.keras"])
def test_an_elastic_fit(tmp_path: Path, spelling: str) -> None:
    script = in_horovods_spelling("examples/keras_digits_elastic.py", spelling, tmp_path)
    assert accuracy_of(script, cwd=tmp_path, PYTHONPATH=OLD_PATHS) > 0.8
