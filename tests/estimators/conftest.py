"""Workers that are shared by many fits, and data to fit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

from hvd_cluster.estimators import Backend
from hvd_cluster.launch.local import Executor


class Kept(Backend):
    """Runs fits in existing workers, and counts the fits: starting workers for each test takes seconds."""

    def __init__(self, executor: Executor, num_proc: int) -> None:
        self._executor = executor
        self._num_proc = num_proc
        self.runs = 0

    def run(self, fn, args=(), kwargs=None, env=None):
        self.runs += 1
        return self._executor.run(fn, args, kwargs)

    def num_processes(self) -> int:
        return self._num_proc


@pytest.fixture(scope="session")
def two_workers() -> Iterator[Kept]:
    with Executor(2, env={"OMP_NUM_THREADS": "1"}, verbose=0) as executor:
        yield Kept(executor, 2)


@pytest.fixture(scope="session")
def three_workers() -> Iterator[Kept]:
    with Executor(3, env={"OMP_NUM_THREADS": "1"}, verbose=0) as executor:
        yield Kept(executor, 3)


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Kept]:
    with Executor(1, env={"OMP_NUM_THREADS": "1"}, verbose=0) as executor:
        yield Kept(executor, 1)


@pytest.fixture(scope="session")
def frame() -> pd.DataFrame:
    """203 rows: x is an array of 4, a a number, y linear in both, c its class, w a weight, v marks validation."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(203, 4))
    a = rng.normal(size=203)
    y = x @ [1.0, -2.0, 0.5, 3.0] + a
    return pd.DataFrame(
        {
            "x": list(x.astype("float32")),
            "a": a,
            "y": y.astype("float32"),
            "c": np.digitize(y, [-2.0, 2.0]),
            "w": rng.uniform(0.5, 2.0, size=203),
            "v": rng.uniform(size=203) < 0.3,
        }
    )
