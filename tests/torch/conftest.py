"""Workers that stay for the whole run, so that a test of a collective costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_cluster.launch.local import Executor

OnRanks = Callable[..., list[Any]]

#: Every test of a collective runs on each of them.
TRANSPORTS = ["shm", "gloo"]


def _initialised(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import hvd_cluster.torch as hvd

    hvd.init()
    return fn(hvd, *args)


def _serve(num_proc: int, transport: str) -> Iterator[OnRanks]:
    env = {
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "20",
        "HOROVOD_SHARED_MEMORY": str(int(transport == "shm")),
    }
    with Executor(num_proc, env=env) as executor:
        yield lambda fn, *args: executor.run(_initialised, (fn, args))


@pytest.fixture(scope="session", params=TRANSPORTS)
def two(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """Call ``two(fn, *args)``: runs ``fn(hvd, *args)`` on two initialised ranks and returns both results."""
    yield from _serve(2, request.param)


@pytest.fixture(scope="session", params=TRANSPORTS)
def three(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """The same with three ranks, where an average is not exact and rings are not symmetric."""
    yield from _serve(3, request.param)


@pytest.fixture(scope="session", params=TRANSPORTS)
def four(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """The same with four ranks, two levels of a binary tree."""
    yield from _serve(4, request.param)
