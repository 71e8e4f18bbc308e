"""The asset bundle is what its documented schema allows and names what is there; its program runs on a local Spark."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import hvd_cluster

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUNDLE = Path(__file__).parents[2] / "deploy" / "databricks"
GPU_BUNDLE = BUNDLE.with_name("databricks_gpu")
SCHEMA = json.loads((Path(__file__).with_name("schemas") / "databricks-bundle.json").read_text())


def bundle() -> Any:
    return yaml.safe_load((BUNDLE / "databricks.yml").read_text())


def test_the_bundle_is_what_the_schema_allows() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(bundle(), SCHEMA)


@pytest.mark.parametrize("wrong", [{"num_workers": "two"}, {"workers": 2}, {"data_security_mode": "SHARED"}])
def test_the_schema_finds_what_is_wrong(wrong: dict[str, Any]) -> None:
    changed = copy.deepcopy(bundle())
    changed["resources"]["jobs"]["train"]["job_clusters"][0]["new_cluster"].update(wrong)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, SCHEMA)


def test_what_the_bundle_names_is_there() -> None:
    text = (BUNDLE / "databricks.yml").read_text()
    configuration = bundle()
    (task,) = configuration["resources"]["jobs"]["train"]["tasks"]
    assert (BUNDLE / task["spark_python_task"]["python_file"]).is_file()
    wheel, *others = task["libraries"]
    assert wheel == {"whl": f"../../dist/hvd_cluster-{hvd_cluster.__version__}-py3-none-any.whl"}
    extras = tomllib.loads((BUNDLE.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [each["pypi"]["package"] for each in others] == extras["data"]
    assert set(re.findall(r"\$\{var\.(\w+)\}", text)) == set(configuration["variables"])
    job = configuration["resources"]["jobs"]["train"]
    assert set(re.findall(r"job\.parameters\.(\w+)", text)) == {each["name"] for each in job["parameters"]}
    assert {task["job_cluster_key"]} == {each["job_cluster_key"] for each in job["job_clusters"]}


def test_the_job_on_serverless_gpus_is_what_the_schema_allows_and_names_what_is_there() -> None:
    configuration = yaml.safe_load((GPU_BUNDLE / "databricks.yml").read_text())
    jsonschema.validate(configuration, SCHEMA)
    job = configuration["resources"]["jobs"]["train"]
    (task,), (environment,) = job["tasks"], job["environments"]
    (deployment,) = task["ai_runtime_task"]["deployments"]
    assert (GPU_BUNDLE / deployment["command_path"]).is_file()
    assert (GPU_BUNDLE / task["ai_runtime_task"]["code_source_path"] / "train.py").is_file()
    assert task["environment_key"] == environment["environment_key"]
    assert re.findall(r"\$\{var\.(\w+)\}", str(job)) == list(configuration["variables"])
    # The launcher reads it beside command.sh.
    requirements = yaml.safe_load((GPU_BUNDLE / "src" / "requirements.yaml").read_text())
    assert requirements["version"] == environment["spec"]["environment_version"]
    (wheel,) = requirements["dependencies"]
    assert wheel.endswith(f"/hvd_cluster-{hvd_cluster.__version__}-py3-none-any.whl")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.spark("local")  # the program has a session of its own
def test_the_program_of_the_job_trains_on_spark(tmp_path: Path) -> None:
    program = f"""
import runpy, sys
from pyspark.sql import SparkSession
SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
sys.argv = ["train.py", "--store", {str(tmp_path / "store")!r}, "--workers", "2", "--run-id", "7"]
runpy.run_path({str(BUNDLE / "src" / "train.py")!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("validation loss ")[1]) < 0.5
    assert (tmp_path / "store" / "model").exists()
