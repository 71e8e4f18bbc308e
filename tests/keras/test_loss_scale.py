"""Loss scaling: a gradient that is not finite on one rank skips the step on all of them."""

from __future__ import annotations

from typing import Any

import pytest


def fitted(hvd: Any, optimizer_of: Any, *, whole: bool, folder: str = "") -> list[Any]:
    """What five batches come to, of which rank 0's second is infinite: the weights, the steps, the scale, the class."""
    import keras
    import numpy as np

    x = np.random.default_rng(0).normal(size=(5, 8, 3)).astype("float32")
    y = x.sum(axis=-1, keepdims=True)
    y[1, 0] = np.inf
    share = slice(None) if whole else slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    x, y = x[:, share].reshape(-1, 3), y[:, share].reshape(-1, 1)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")])
    model.compile(optimizer_of(), "mse")
    model.fit(x, y, batch_size=8 if whole else 4, epochs=1, shuffle=False, verbose=0)
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    if folder:
        model.save(f"{folder}/{hvd.rank()}.keras")
    optimizer = model.optimizer
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    # Keras 3.3 counts in the inner optimizer alone.
    read = (optimizer.dynamic_scale, optimizer.inner_optimizer.iterations)
    scale, steps = (float(keras.ops.convert_to_numpy(value)) for value in read)
    return [weights, steps, scale, f"{type(optimizer).__module__}.{type(optimizer).__name__}"]


@pytest.mark.parametrize("place", ["outside", "inside", "by compile"])
def test_all_ranks_skip_the_step_that_one_rank_cannot_take(two: Any, place: str) -> None:
    fit = fitted

    def fn(hvd: Any) -> list[Any]:
        import keras

        def plain() -> Any:
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))

        def ours() -> Any:
            sgd = keras.optimizers.SGD(0.05, momentum=0.9)
            if place == "outside":
                return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd))
            distributed = hvd.DistributedOptimizer(sgd)
            return keras.optimizers.LossScaleOptimizer(distributed) if place == "inside" else distributed

        keras.config.set_dtype_policy("mixed_float16" if place == "by compile" else "float32")
        try:
            weights, steps, scale, kind = fit(hvd, ours, whole=False)
            expected, *_ = fit(hvd, plain, whole=True)
        finally:
            keras.config.set_dtype_policy("float32")
        return [float(abs(weights - expected).max()), steps, scale, kind]

    for error, *rest in two(fn):
        assert error < 1e-5
        assert rest == [4, 2.0**14, "keras.optimizers.LossScaleOptimizer"]


@pytest.mark.slow
def test_passes_that_are_not_finite_do_not_count_and_the_model_loads_plainly(two: Any, tmp_path: Any) -> None:
    fit = fitted

    def fn(hvd: Any, folder: str) -> list[Any]:
        import warnings

        import keras

        def scaled(inner: Any) -> Any:
            return keras.optimizers.LossScaleOptimizer(inner)

        def ours() -> Any:
            options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
            return scaled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), **options))

        weights, steps, *_ = fit(hvd, ours, whole=False, folder=folder)
        theirs = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
        expected, *_ = fit(hvd, lambda: scaled(theirs), whole=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of variables that do not match
            again = keras.models.load_model(f"{folder}/{hvd.rank()}.keras")
        distributed = hvd.DistributedOptimizer(again.optimizer)
        found = [again.optimizer, distributed, distributed.inner_optimizer]
        try:
            hvd.DistributedOptimizer(distributed)
        except ValueError as error:
            found.append(str(error))
        known = [hasattr(each, "register_local_var") for each in found[:3]]
        same = len(distributed.variables()) == len(again.optimizer.variables)
        return [float(abs(weights - expected).max()), steps, *known, same, found[3]]

    for error, *rest in two(fn, str(tmp_path)):
        assert error < 1e-5
        assert rest == [4, False, True, True, True, "this optimizer is already distributed"]
