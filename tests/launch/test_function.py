from __future__ import annotations

import os

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
