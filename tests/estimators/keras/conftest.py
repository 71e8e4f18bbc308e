"""A driver for each backend of Keras, with workers that serve many fits."""

from __future__ import annotations

from importlib.util import find_spec

import cloudpickle
import keras_driver
import pytest
from keras_driver import ENVIRONMENT, in_driver

from hvd_cluster.launch.local import Executor

cloudpickle.register_pickle_by_value(keras_driver)


@pytest.fixture(
    scope="session",
    params=[
        "torch",
        pytest.param("tensorflow", marks=pytest.mark.slow),
        pytest.param("jax", marks=pytest.mark.slow),
    ],
)
def backend(request):
    """A backend of Keras."""
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return request.param


@pytest.fixture(scope="session")
def driver(backend):
    """Call ``driver(fn, *args)``: runs ``fn(workers, *args)`` in a process whose Keras has that backend."""
    env = {**ENVIRONMENT, "KERAS_BACKEND": backend}
    with Executor(1, env=env) as executor:

        def driver(fn, *args):
            return executor.run(in_driver, (env, fn, args))[0]

        driver(lambda workers: [workers(number).executor.start() for number in (1, 2)] and None)
        yield driver
        driver(lambda workers: [workers(number).executor.close() for number in (1, 2)] and None)
