"""Two workers with TensorFlow that stay for the whole run: importing it costs seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from hvd_cluster.launch.local import Executor

OnRanks = Callable[..., list[Any]]
MODES = ["eager", "function", "v1"]

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


def _run_in(mode: str, build: Any) -> Any:
    """``build()`` in one of TensorFlow's ways to run things, as NumPy values."""
    import tensorflow as tf

    if mode == "eager":
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), build())
    if mode == "function":
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), tf.function(build)())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(build())


def _gradient_of(target: Any, source: Any) -> Any:
    """Works in each of the three ways."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(source)
        value = target(source)
    return tape.gradient(value, source)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ranks(two: Any, mode: str) -> Any:
    """``ranks(build)``: what ``build(hvd, tf)`` gives on both ranks, as nested lists."""
    body_of, differentiate = _run_in, _gradient_of

    def on_rank(hvd: Any, build: Any) -> Any:
        import tensorflow as tf

        result = body_of(mode, lambda: build(hvd, tf, differentiate))
        return tf.nest.map_structure(lambda array: array.tolist(), result)

    return lambda build: two(on_rank, build)


@pytest.fixture
def run_in() -> Any:
    """``run_in(mode, build)``, for a function that a rank runs."""
    return _run_in


@pytest.fixture
def gradient_of() -> Any:
    """``gradient_of(target, source)``, for a function that a rank runs."""
    return _gradient_of
