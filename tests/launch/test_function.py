from __future__ import annotations

import logging
import os
from typing import Any

import pytest

import hvd_cluster
from hvd_cluster.errors import WorkerFailedError


def test_horovods_names_of_the_arguments_work() -> None:
    def fn(a: int, b: int) -> tuple[int, str]:
        return a + b, os.environ["HOROVOD_RANK"]

    results = hvd_cluster.run(fn, (1,), {"b": 2}, num_proc=2, use_gloo=True, disable_cache=True)
    assert results == [(3, "0"), (3, "1")]
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"):
        assert len(hvd_cluster.run(os.getpid, np=1)) == 1


def test_a_failure_is_the_runtime_error_that_old_programs_catch() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
        hvd_cluster.run(lambda: 1 / 0, verbose=0)
    assert isinstance(caught.value, WorkerFailedError)


def test_two_controllers_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="use_gloo and use_mpi exclude each other"):
        hvd_cluster.run(print, use_gloo=True, use_mpi=True)


def test_mpi_is_answered_with_one_line_of_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert hvd_cluster.run(int, ("7",), use_mpi=True) == [7]
    assert [record.message for record in caplog.records] == [
        "use_mpi=True has no effect: MPI is not used, there is one rendezvous, our own"
    ]


def test_an_argument_of_elastic_jobs_costs_a_line_where_the_job_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert hvd_cluster.run(int, ("7",), max_num_proc=4, reset_limit=3, cooldown_range=(10, 60), slots=2) == [7]
    told = [record.message.partition(" has no effect without ")[0] for record in caplog.records]
    assert told == ["max_num_proc", "reset_limit", "cooldown_range", "slots"]


@pytest.mark.parametrize("num_proc", [0, -1, "2", 1.5])
def test_fewer_than_one_worker_is_refused(num_proc: Any) -> None:
    with pytest.raises(ValueError, match=f"num_proc={num_proc!r} must be a whole number of at least 1"):
        hvd_cluster.run(print, num_proc=num_proc)
