"""Which Python runs the tasks, in programs whose virtual environment is not activated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pandas
import torch
from pyspark.sql import SparkSession

import hvd_cluster.spark
import hvd_cluster.torch as hvd
from hvd_cluster.data import materialize


def place():
    hvd.init()
    return hvd.rank(), hvd.size()


spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
for call in (
    lambda: hvd_cluster.spark.run(place, num_proc=2),
    lambda: materialize(spark.createDataFrame(pandas.DataFrame({"x": [1.0, 2.0]})), "store", columns=["x"]).train.rows,
):
    try:
        print("found", call())
    except Exception as error:
        print("raised", type(error).__name__, error)
spark.stop()
"""


def printed(folder: Path, **environ: str) -> list[str]:
    """What the program prints where the first python3 of the PATH has no packages."""
    other = folder / "bin" / "python3"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    (folder / "program.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    kept |= {"PATH": f"{other.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=kept, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("found", "raised"))]


@pytest.mark.timeout(240)
@pytest.mark.spark("local")  # each has a session of its own
def test_tasks_on_this_machine_run_with_this_python(tmp_path: Path) -> None:
    assert printed(tmp_path) == ["found [(0, 2), (1, 2)]", "found 2"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.spark("local")
def test_a_python_without_our_packages_is_said_to_be_one(tmp_path: Path) -> None:
    for line in printed(tmp_path, PYSPARK_PYTHON=str(tmp_path / "bin" / "python3")):
        assert line.startswith("raised LaunchError")
        assert re.search(r"the Python that runs Spark's tasks has no module '\w+'\. Install it on every host", line)
        assert f"set PYSPARK_PYTHON to that Python; this process runs {sys.executable}" in line
