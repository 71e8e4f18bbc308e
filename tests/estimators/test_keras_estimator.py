"""KerasEstimator in local processes, on each backend of Keras: models in, models out."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import cloudpickle
import pytest

from hvd_cluster.launch.local import Executor

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def in_driver(env: dict[str, str], fn: Any, args: tuple[Any, ...]) -> Any:
    """Call ``fn(workers, *args)`` in a process that keeps workers for its fits: a driver has one backend of Keras."""
    import sys
    import types

    from hvd_cluster.estimators import Backend
    from hvd_cluster.launch.local import Executor

    kept = sys.modules.setdefault("kept_by_the_tests_of_keras", types.ModuleType("kept_by_the_tests_of_keras"))

    class Kept(Backend):
        def __init__(self, num_proc: int) -> None:
            self._num_proc = num_proc
            self.executor = Executor(num_proc, env=env, verbose=0)
            self.runs = 0

        def run(self, fn, args=(), kwargs=None, env=None):
            self.runs += 1
            return self.executor.run(fn, args, kwargs)

        def num_processes(self):
            return self._num_proc

    def workers(num_proc: int) -> Backend:
        name = f"workers_{num_proc}"
        if not hasattr(kept, name):
            setattr(kept, name, Kept(num_proc))
        return getattr(kept, name)

    return fn(workers, *args)


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


def dense(lr=0.05, dropout=0.0, outputs=1, compile=True):
    import keras

    keras.utils.set_random_seed(1)
    x, a = keras.Input((4,), name="x"), keras.Input((1,), name="a")
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()([x, a]))
    hidden = keras.layers.Dropout(dropout)(hidden)
    model = keras.Model([x, a], [keras.layers.Dense(1, name=f"y{i}")(hidden) for i in range(outputs)])
    if compile:
        model.compile(keras.optimizers.SGD(lr, momentum=0.9), "mse", metrics=["mae"] if outputs == 1 else None)
    return model


def estimator(backend, model=None, **params):
    from hvd_cluster.estimators import KerasEstimator

    given = {
        "model": dense() if model is None else model,
        "feature_cols": ["x", "a"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "random_seed": 5,
        "verbose": 0,
        "scale_lr": False,
        "backend": backend,
        **params,
    }
    return KerasEstimator(**given)


def difference(left, right):
    pairs = zip(left.getModel().get_weights(), right.getModel().get_weights(), strict=True)
    return max(float(abs(a - b).max()) for a, b in pairs)


def test_two_workers_reach_the_weights_of_one_on_the_same_global_batches(driver, frame):
    fit, apart = estimator, difference

    def fn(workers, frame):
        import numpy as np

        two = fit(workers(2), batch_size=8, validation=0.2).fit(frame)
        one = fit(workers(1), batch_size=16, validation=0.2).fit(frame)
        scored = two.transform(frame)
        x, a = np.stack(frame["x"]), frame["a"].to_numpy("float32")[:, None]
        expected = two.getModel().predict([x, a], verbose=0).ravel()
        return {
            "apart": apart(one, two),
            "histories": [each.getHistory() for each in (one, two)],
            "columns": list(two.history.columns),
            "scores": float(abs(scored["y__output"].to_numpy() - expected).max()),
            "type": str(scored["y__output"].dtype),
            "run": two.getRunId(),
        }

    found = driver(fn, frame)
    assert found["apart"] < 1e-5
    one, two = found["histories"]
    assert set(two) >= {"loss", "mae", "val_loss", "val_mae"}
    for name, values in two.items():
        assert values == pytest.approx(one[name], rel=1e-4), name
    assert {"epoch", "train_loss", "train_mae", "validation_loss", "validation_mae"} <= set(found["columns"])
    assert found["scores"] < 1e-5
    assert found["type"] == "float32"
    assert found["run"].startswith("keras_")
