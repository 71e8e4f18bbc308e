"""Two workers with TensorFlow that stay for the whole run: importing it costs seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from hvd_cluster.launch.local import Executor

OnRanks = Callable[..., list[Any]]

ENV = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
}


def _initialised(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import hvd_cluster.tensorflow as hvd

    hvd.init(process_sets="dynamic")
    return fn(hvd, *args)


@pytest.fixture(scope="session")
def two() -> Iterator[OnRanks]:
    """Call ``two(fn, *args)``: runs ``fn(hvd, *args)`` on two initialised ranks and returns both results."""
    if find_spec("tensorflow") is None:  # importing it here would cost seconds and threads
        pytest.skip("needs tensorflow")
    with Executor(2, env=ENV) as executor:
        yield lambda fn, *args: executor.run(_initialised, (fn, args))
