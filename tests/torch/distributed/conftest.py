"""Workers that stay, with a default group of the backend hvd and a second one of Gloo to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_cluster.launch.local import Executor

OnRanks = Callable[..., list[Any]]


def _initialised(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import sys

    import torch.distributed as dist

    import hvd_cluster.torch  # noqa: F401 - registers the backend

    kept = sys.modules.setdefault("_hvd_test_groups", type(sys)("_hvd_test_groups")).__dict__
    if not dist.is_initialized():
        dist.init_process_group("hvd")
        kept["gloo"] = dist.new_group(backend="gloo")
    return fn(dist, kept["gloo"], *args)


def _serve(num_proc: int, transport: str) -> Iterator[OnRanks]:
    env = {
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "20",
        "HOROVOD_SHARED_MEMORY": str(int(transport == "shm")),
    }
    with Executor(num_proc, env=env) as executor:
        yield lambda fn, *args: executor.run(_initialised, (fn, args))


@pytest.fixture(scope="session", params=["shm", "gloo"])
def pair(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """Call ``pair(fn, *args)``: runs ``fn(torch.distributed, gloo_group, *args)`` on two ranks; returns the results."""
    yield from _serve(2, request.param)


@pytest.fixture(scope="session", params=["shm", "gloo"])
def trio(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """The same with three ranks."""
    yield from _serve(3, request.param)


@pytest.fixture(scope="session")
def four(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """The same with four ranks."""
    yield from _serve(4, "shm")
