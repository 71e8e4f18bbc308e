"""The default group of torch.distributed is ready when the function starts, under every launcher, if asked for."""

from __future__ import annotations

from typing import Any

import pytest

import hvd_cluster
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local

ENV = {"OMP_NUM_THREADS": "1"}


def total() -> tuple[str, float]:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return dist.get_backend(), float(tensor[0])


@pytest.mark.parametrize("backend", ["hvd", "gloo"])
def test_the_group_exists_when_the_function_starts(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    env = {**ENV, "PYTHONWARNINGS": "always::ResourceWarning"}
    assert local.run(total, num_proc=2, env=env, torch_backend=backend) == [(backend, 2.0)] * 2
    assert "unclosed" not in capfd.readouterr().err  # the connection of the group's store


@pytest.mark.slow
def test_each_call_of_an_executor_gets_a_group() -> None:
    with local.Executor(2, env=ENV, torch_backend="hvd") as executor:
        assert [executor.run(total) for _ in range(2)] == [[("hvd", 2.0)] * 2] * 2


@pytest.mark.slow
def test_the_variable_is_the_default_and_the_other_launchers_take_the_argument() -> None:
    env = {**ENV, "HOROVOD_TORCH_BACKEND": "hvd"}
    assert local.run(total, num_proc=2, env=env) == [("hvd", 2.0)] * 2
    assert hvd_cluster.run(total, num_proc=2, env=ENV, torch_backend="hvd") == [("hvd", 2.0)] * 2


def test_a_function_that_fails_is_not_kept_waiting() -> None:
    def fn() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise KeyError("mine")
        dist.barrier()

    with pytest.raises(WorkerFailedError, match="mine"):
        local.run(fn, num_proc=2, env=ENV, torch_backend="hvd")


def test_an_elastic_job_is_refused() -> None:
    def fn() -> Any:
        return None

    env = {**ENV, "HOROVOD_ELASTIC": "1", "HOROVOD_TORCH_BACKEND": "hvd"}
    with pytest.raises(WorkerFailedError, match="does not work in an elastic job"):
        local.run(fn, num_proc=1, env=env)
