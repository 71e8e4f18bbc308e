"""Models in MLflow: what is logged, and a pyfunc that scores columns where hvd_cluster is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("mlflow", reason="mlflow is not installed")
pytest.importorskip("sqlalchemy", reason="MLflow's database needs sqlalchemy")
pytest.importorskip("alembic", reason="MLflow's database needs alembic")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOT = Path(__file__).parents[3]
#: Has MLflow, torch and the model's own packages, and nothing of ours.
BARE = ROOT / ".venv-pyfunc" / "bin" / "python"


def run(script, *arguments, tmp_path, python=sys.executable, **more):
    """What a script prints: in another process, because MLflow leaves threads and variables behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "TMPDIR": str(tmp_path)}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **more}
    command = [str(python), str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def found_in(output):
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


@pytest.fixture(scope="module")
def torch_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    return folder, found_in(run("logged_models.py", folder, tmp_path=folder))


def test_a_fit_logs_signature_requirements_and_params(torch_models):
    _, found = torch_models
    inputs = {one["name"]: one for one in json.loads(found["signature"]["inputs"])}
    assert {name: one["type"] for name, one in inputs.items()} == {
        "text": "string",
        "raw": "binary",
        "array": "array",
        "matrix": "array",
        "count": "any",
        "number": "integer",
        "day": "datetime",
        "moment": "any",
        "kind": "any",
        "price": "any",
        "tags": "any",
    }
    outputs = [(one["name"], one["type"]) for one in json.loads(found["signature"]["outputs"])]
    assert outputs == [("p", "array"), ("guess", "long"), *((f"logit_{i}", "float") for i in range(3))]
    assert found["metadata"]["input_types"]["count"] == "int64"
    assert found["metadata"]["output_shapes"] == {"p": [3]}
    names = [line.partition("==")[0].partition(">")[0] for line in found["requirements"]]
    assert sorted(names) == ["cloudpickle", "mlflow", "numpy", "pandas", "pyarrow", "torch"]
    assert not any("+" in line for line in found["requirements"])
    params = found["params"]
    assert params["output_fn"] == 'lambda output: output["logits"]'
    assert (params["preprocess"], params["loss"], params["optimizer"]) == ("encoded", "cross_entropy", "SGD")
    assert not any("0x" in text for text in params.values())
    assert int(found["version"]) == 1
    assert found["same_weights"]
    assert found["loaded"] == [True, True]  # a loaded model knows the types, and no rows


@pytest.mark.parametrize("uri", ["folder", "models:/cities@champion"])
def test_a_pyfunc_scores_like_transform_where_hvd_cluster_is_not_installed(torch_models, uri, tmp_path):
    folder, found = torch_models
    given = found["folder"] if uri == "folder" else uri
    database = f"sqlite:///{folder}/mlflow.db"
    output = run("score_logged_model.py", given, folder, tmp_path=tmp_path, PYTHONPATH="", MLFLOW_TRACKING_URI=database)
    assert "SAME p guess logit_0 logit_1 logit_2" in output


@pytest.mark.skipif(not BARE.exists(), reason="`make matrix-pyfunc` makes .venv-pyfunc")
def test_a_pyfunc_scores_like_transform_in_the_environment_of_the_matrix(torch_models, tmp_path):
    folder, found = torch_models
    assert "SAME p guess" in run(
        "score_logged_model.py", found["folder"], folder, tmp_path=tmp_path, python=BARE, PYTHONPATH=""
    )


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_a_keras_model_scores_like_transform_where_hvd_cluster_is_not_installed(tmp_path, backend):
    pytest.importorskip("keras", reason="keras is not installed")
    if find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    found = found_in(run("logged_keras_model.py", tmp_path, tmp_path=tmp_path, KERAS_BACKEND=backend))
    assert {line.partition("==")[0] for line in found["requirements"]} > {"keras", "torch", "cloudpickle", "mlflow"}
    assert "SAME y__output" in run("score_logged_model.py", found["folder"], tmp_path, tmp_path=tmp_path, PYTHONPATH="")


def test_a_pyfunc_gets_the_values_that_transform_gets(tmp_path):
    found = found_in(run("logged_columns.py", tmp_path, tmp_path=tmp_path))
    assert [name for name, (_, is_same, _) in found.items() if not is_same] == []
    assert found["lists of floats"][0] == "['x': Array(double) (required)]"
    assert found["durations"][2] is found["lists of durations"][2] is None  # JSON has none: no input example
    assert found["lists of decimals"][2]
    assert found["structs of decimals"][2]


@pytest.mark.parametrize("session", ["local[1]", "connect"])
def test_a_spark_udf_returns_what_transform_and_a_local_run_return(tmp_path, session):
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    found = found_in(run("udf_scores.py", tmp_path, tmp_path=tmp_path, SESSION=session, TZ="UTC"))
    assert found["rows"] == 30
    assert found["different"] == 0
