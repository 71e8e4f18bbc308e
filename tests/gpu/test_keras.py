"""Keras on torch and on JAX: two ranks that share a GPU train as on the CPU, and continue behind a step that failed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import cloudpickle
import pytest

from hvd_cluster.launch.local import Executor

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "30", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}


def train(is_on_gpu: bool) -> tuple[str, list[float], list[float], list[bool]]:
    """Where the weights are; the weights after a fit, and after one behind two that failed; whether those said why."""
    import keras
    import numpy as np

    import hvd_cluster.keras as hvd
    from hvd_cluster.engine import basics
    from hvd_cluster.errors import HorovodInternalError
    from hvd_cluster.keras.device import use_device

    hvd.init()
    if is_on_gpu:
        use_device(0)
    generator = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    model.set_weights([generator.normal(size=weight.shape) for weight in model.get_weights()])
    state = hvd.elastic.KerasState(model)
    x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")

    def fit() -> list[float]:
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
        return [float(value) for weight in model.get_weights() for value in weight.ravel()]

    undisturbed, explained, engine = fit(), [], basics.engine()
    submit = engine.submit
    for num_steps in (2, 0):  # fails in the third step, and in the first
        state.restore()
        left = [num_steps]

        def failing(request: Any, left: Any = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise HorovodInternalError("a worker is gone")
            return submit(request, **options)

        engine.submit = failing  # type: ignore[method-assign]
        try:
            fit()
        except Exception as error:  # noqa: BLE001 - each backend has its own
            explained.append("a worker is gone" in str(error))
        finally:
            del engine.submit
    state.restore()
    device = model.weights[0].value.device
    return str(getattr(device, "type", None) or device.platform), undisturbed, fit(), explained


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_trains_as_on_the_cpu_and_continues_behind_a_step_that_failed(backend: str) -> None:
    if not (find_spec("keras") and find_spec(backend)):
        pytest.skip(f"needs keras and {backend}")
    found = []
    for is_on_gpu in (False, True):
        with Executor(2, env={**ENV, "KERAS_BACKEND": backend, **({} if is_on_gpu else ON_CPU)}) as executor:
            found.append(executor.run(train, (is_on_gpu,)))
    on_cpu, on_gpu = found
    assert on_gpu[0][1] == on_gpu[1][1]  # the same weights on both ranks
    for (_, expected, _, _), (device, undisturbed, continued, explained) in zip(on_cpu, on_gpu, strict=True):
        assert device in ("cuda", "gpu")
        assert explained == [True, True]
        assert undisturbed == pytest.approx(expected, rel=1e-2, abs=1e-3)
        assert continued == pytest.approx(undisturbed, rel=1e-5)
