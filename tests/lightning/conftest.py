"""Two workers with Lightning in them; they stay for the whole run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import cloudpickle
import pytest

from hvd_cluster.launch.local import Executor

OnRanks = Callable[..., list[Any]]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _initialised(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import logging
    import sys
    import warnings

    # Lightning looks for MPI, which would start Open MPI's daemon in the worker.
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]

    # What Lightning says of small loaders and of programs without loggers.
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    import hvd_cluster.torch as hvd

    hvd.init()
    return fn(hvd, *args)


@pytest.fixture(scope="session")
def two() -> Iterator[OnRanks]:
    """Call ``two(fn, *args)``: runs ``fn(hvd, *args)`` on two initialised ranks and returns both results."""
    if find_spec("lightning") is None:
        pytest.skip("needs lightning")
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}
    with Executor(2, env=env) as executor:
        yield lambda fn, *args: executor.run(_initialised, (fn, args))
