"""HorovodRunner with each kind of session, and in processes of the driver's own machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.oldpaths.shim import shim_folder
from hvd_cluster.oldpaths.table import SPARKDL_TABLE
from hvd_cluster.spark import HorovodRunner
from hvd_cluster.spark.driver_log import MAX_CHARS, log_to_driver

SCALE = 10


def total(base: int, *, who: str = "") -> tuple[float, str]:
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    print(f"an ordinary line of {who}")
    log_to_driver(f"rank {hvd.rank()} of {hvd.size()}")
    return hvd.allreduce(torch.tensor([float(base + hvd.rank())]), op=hvd.Sum).item() * SCALE, who


@pytest.mark.spark("connect", "local", "local-cluster", "standalone")
def test_rank_0s_result_comes_back_and_only_what_was_sent_on_purpose_is_shown(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert HorovodRunner(np=2).run(total, base=1, who="it") == (30.0, "it")
    shown = capsys.readouterr().out
    assert sorted(line for line in shown.splitlines() if line.startswith("rank")) == ["rank 0 of 2", "rank 1 of 2"]
    assert "an ordinary line" not in shown
    assert "HorovodRunner: total and its arguments are " in shown
    assert "bytes when pickled; it captures SCALE, log_to_driver." in shown


@pytest.mark.spark("local")
def test_all_output_is_shown_on_demand_and_a_failure_is_the_users_own(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert HorovodRunner(np=2, driver_log_verbosity="all").run(total, base=0) == (10.0, "")
    assert "[1]<stdout>:an ordinary line of " in capsys.readouterr().out

    def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(WorkerFailedError, match=r"^Traceback[^$]*ValueError: bad"):
        HorovodRunner(np=1).run(fail)


@pytest.mark.spark("local")
def test_no_number_means_all_slots_and_is_deprecated(spark: Any, spark_slots: int) -> None:
    with pytest.warns(DeprecationWarning, match=r"HorovodRunner\(np=0\) is deprecated"):
        runner = HorovodRunner(np=0)
    assert runner.run(lambda: os.environ["HOROVOD_SIZE"]) == str(spark_slots)


def test_below_zero_the_processes_are_here_and_need_no_spark(capfd: pytest.CaptureFixture[str]) -> None:
    assert HorovodRunner(np=-2).run(total, base=1) == (30.0, "")
    shown = capfd.readouterr().out
    assert "rank 1 of 2\n" in shown
    assert "[0]<stdout>:an ordinary line" in shown


def test_a_long_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_driver("x" * 5000)
    assert capsys.readouterr().out == "x" * MAX_CHARS + "\n"


def test_a_function_with_a_variable_that_is_not_set_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def made(uses_extra: bool, base: int) -> Callable[[], int]:
        if uses_extra:
            extra = 5

        def train() -> int:
            return base + (extra if uses_extra else 0)

        return train

    assert HorovodRunner(np=-1).run(made(False, 1)) == 1
    assert "it captures base, uses_extra." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("logs", "text"),
    [
        ({"loss": 0.5, "f1": np.array([0.25, 1 / 3], "float32")}, "epoch 1: loss 0.5, f1 [0.25, 0.3333]"),
        ({"confusion": [[1, 2], [3, 4]], "one": np.array([2.0])}, "epoch 1: confusion [1, 2, 3, 4], one 2"),
        ({"phase": "warm-up", "none": None}, "epoch 1: phase warm-up, none None"),
    ],
)
def test_the_keras_callback_reports_metrics_of_every_shape(
    logs: dict[str, object], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("keras", reason="keras is not installed")
    from hvd_cluster.spark.log_callback import LogCallback

    LogCallback().on_epoch_end(0, logs)
    assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.slow
def test_the_keras_callback_reports_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    def fit() -> None:
        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        import numpy as np

        from hvd_cluster.spark.log_callback import LogCallback

        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
        x = np.zeros((4, 2), "float32")
        model.fit(x, x[:, :1] + 1, batch_size=2, verbose=0, callbacks=[LogCallback(per_batch_log=True)])

    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    HorovodRunner(np=-1).run(fit)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("batch", "epoch"))]
    assert [line.partition(":")[0] for line in lines] == ["batch 1", "batch 2", "epoch 1"]
    assert lines[0] == "batch 1: loss 1"


def test_wrong_arguments_are_all_named_and_the_old_positional_form_is_none() -> None:
    with pytest.raises(ValueError, match=r"np='2' must be a whole number; driver_log_verbosity='some' must be one of"):
        HorovodRunner(np="2", driver_log_verbosity="some")  # type: ignore[arg-type]
    for wrong in (None, True, 1.5):
        with pytest.raises(ValueError, match=rf"np={wrong} must be a whole number"):
            HorovodRunner(np=wrong)  # type: ignore[arg-type]
    assert HorovodRunner(np=np.int64(-2)).num_processor == -2  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        HorovodRunner(2)  # type: ignore[misc]


def test_without_a_session_the_message_is_horovods() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    with pytest.raises(LaunchError, match="Could not find an active SparkContext"):
        HorovodRunner(np=1).run(lambda: 1)


@pytest.mark.parametrize("shim", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sparkdl_is_answered_for_where_it_is_absent(shim: bool, tmp_path: Path) -> None:
    code = f"""
{"" if shim else "import hvd_cluster.compat"}
import importlib, json, sparkdl
from sparkdl import HorovodRunner
from sparkdl.horovod import log_to_driver
found = {{}}
for path, names in {json.dumps({path: sorted(row.names) for path, row in SPARKDL_TABLE.items()})}.items():
    module = importlib.import_module(".".join(filter(None, ("sparkdl", path))))
    found[path] = [callable(getattr(module, name)) for name in names]
print(json.dumps([found, HorovodRunner.__module__, callable(module.LogCallback)]))
"""
    environ = {**os.environ, **({"PYTHONPATH": shim_folder()} if shim else {})}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, module, has_callback = json.loads(done.stdout)
    assert all(all(each) for each in found.values())
    assert (module, has_callback) == ("hvd_cluster.spark.horovod_runner", True)


def test_a_real_sparkdl_comes_first(tmp_path: Path) -> None:
    (tmp_path / "sparkdl").mkdir()
    (tmp_path / "sparkdl" / "__init__.py").write_text("HorovodRunner = 'the real one'\n")
    for shim in (True, False):
        path = f"{shim_folder()}{os.pathsep}{tmp_path}" if shim else str(tmp_path)
        code = f"{'' if shim else 'import hvd_cluster.compat; '}import sparkdl; print(sparkdl.HorovodRunner)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "the real one"
