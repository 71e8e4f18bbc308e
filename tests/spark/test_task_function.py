"""The function that Spark unpickles on executors: what it needs there, and what it says where that is missing."""

from __future__ import annotations

import pickle
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import hvd_cluster
import hvd_cluster.spark
from hvd_cluster.errors import LaunchError
from hvd_cluster.spark import task_function
from hvd_cluster.spark.messages import Versions


def test_the_task_can_be_unpickled_where_this_package_is_missing(tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("pyspark.cloudpickle", reason="pyspark is not installed")
    function = task_function.task_for(
        "hvd_cluster.spark.barrier", (asdict(Versions.here()), pickle.dumps(None), b"call"), barrier=True
    )
    (tmp_path / "task").write_bytes(cloudpickle.dumps(function))
    code = (
        "import pickle, sys; sys.modules['hvd_cluster'] = None; "
        f"task = pickle.load(open({str(tmp_path / 'task')!r}, 'rb')); print(callable(task))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.spark("local", "local-cluster")
@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("raise ImportError('not here')", r"hvd_cluster cannot be imported on \S+ by .*not here.*: install it there"),
        (
            f"__version__ = '0.0.1'; __path__.append({str(Path(hvd_cluster.__file__).parent)!r})",
            rf"hvd-cluster is {hvd_cluster.__version__} on the driver, but 0\.0\.1 on \S+: install the same version",
        ),
    ],
)
def test_executors_without_this_very_package_say_what_to_do(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, said: str
) -> None:
    (tmp_path / "hvd_cluster").mkdir()
    (tmp_path / "hvd_cluster" / "__init__.py").write_text(package)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd "{tmp_path}"; PYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    with pytest.raises(LaunchError, match=said) as raised:
        hvd_cluster.spark.run(lambda: 1, num_proc=2)
    assert str(raised.value).count("install") == 1  # both executors say the same


@pytest.mark.spark("local", "local-cluster")
def test_another_python_on_the_executors_is_said(spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others = [
        Path(sys.base_prefix).parent / f"3.{minor}*" for minor in (10, 11, 12, 13) if minor != sys.version_info[1]
    ]
    found = [python for pattern in others for python in pattern.parent.glob(f"{pattern.name}/bin/python3")]
    if not found:
        pytest.skip(f"no Python of another minor version beside {sys.base_prefix}")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(found[0]))
    with pytest.raises(LaunchError, match="Spark could not run the workers.*[Pp]ython.*version") as raised:
        hvd_cluster.spark.run(lambda: 1, num_proc=1)
    assert len(str(raised.value)) < 1200
