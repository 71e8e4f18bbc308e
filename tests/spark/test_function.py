"""Wrong arguments of ``run`` are named before anything starts; no session is needed to find out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

import hvd_cluster.spark
from hvd_cluster.errors import LaunchError

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")


def test_without_a_session_the_message_is_horovods() -> None:
    with pytest.raises(
        LaunchError, match=r"Could not find an active SparkContext, are you running in a PySpark session\?"
    ):
        hvd_cluster.spark.run(lambda: 1, num_proc=1)


@pytest.mark.parametrize("run", [hvd_cluster.spark.run, hvd_cluster.spark.run_elastic])
@pytest.mark.parametrize("num_proc", [0, -1, 2.5, "4"])
def test_what_is_not_a_number_of_workers_is_refused(num_proc: Any, run: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=f"num_proc={num_proc!r} must be a whole number of at least 1"):
        run(lambda: 1, num_proc=num_proc)


def test_all_wrong_arguments_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_proc=0.*; start_timeout=0.*; use_gloo and use_mpi.*; the variable N="):
        hvd_cluster.spark.run(
            lambda: 1,
            num_proc=0,
            start_timeout=0,
            use_gloo=True,
            use_mpi=True,
            env={"N": [1]},  # type: ignore[dict-item]
        )


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function"):
        hvd_cluster.spark.run(3, num_proc=1)  # type: ignore[arg-type]


def test_arguments_without_effect_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(LaunchError):
        hvd_cluster.spark.run(lambda: 1, num_proc=1, use_mpi=True, extra_mpi_args="--bind-to core")
    assert "extra_mpi_args='--bind-to core' has no effect" in caplog.text
    assert caplog.text.count("use_mpi=True has no effect: hvd_cluster does not use MPI") == 1
