"""Two workers for each backend of Keras that is installed; they stay for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from hvd_cluster.launch.local import Executor

OnRanks = Callable[..., list[Any]]
BACKENDS = ["tensorflow", "torch", pytest.param("jax", marks=pytest.mark.slow)]


def _initialised(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import hvd_cluster.keras as hvd

    hvd.init()
    return fn(hvd, *args)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend of Keras."""
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return str(request.param)


@pytest.fixture(scope="session")
def two(backend: str) -> Iterator[OnRanks]:
    """Call ``two(fn, *args)``: runs ``fn(hvd, *args)`` on two initialised ranks and returns both results."""
    if find_spec("keras") is None:
        pytest.skip("needs keras")
    env = {
        "KERAS_BACKEND": backend,
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
    }
    with Executor(2, env=env) as executor:
        yield lambda fn, *args: executor.run(_initialised, (fn, args))
