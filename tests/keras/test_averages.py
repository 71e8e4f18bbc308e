"""Averages of the weights (``use_ema``), which Keras's optimizers keep and a fit ends with."""

from __future__ import annotations

from typing import Any

import pytest


def fitted(hvd: Any, *, passes: int, is_scaled: bool = False, overwrite: bool = False, steps: int = 5) -> Any:
    """The weights after steps of 16 rows: plain Keras's if ``passes`` is 0, else of two ranks in that many passes."""
    import keras
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.normal(size=(steps, 16, 3)).astype("float32")
    y = x.sum(axis=-1, keepdims=True)
    if passes:
        half = slice(8 * hvd.rank(), 8 * hvd.rank() + 8)
        x, y = x[:, half], y[:, half]
    frequency = max(passes, 1) if overwrite else None  # counts passes
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=frequency)
    if passes:
        options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    rows = x.shape[1] // max(passes, 1)
    model.fit(x.reshape(-1, 3), y.reshape(-1, 1), batch_size=rows, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.slow
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_averages_over_steps_of_several_passes_are_those_of_whole_batches(
    two: Any, overwrite: bool, is_scaled: bool
) -> None:
    fit = fitted

    def fn(hvd: Any) -> float:
        ours, theirs = (fit(hvd, passes=passes, overwrite=overwrite, is_scaled=is_scaled) for passes in (4, 0))
        return float(abs(ours - theirs).max())

    assert max(two(fn)) < 1e-5


@pytest.mark.parametrize("kind", ["SGD", "MultiOptimizer"])
def test_a_fit_that_ends_before_its_first_step_keeps_the_weights(two: Any, kind: str) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        optimizer = keras.optimizers.SGD(0.1, use_ema=True)
        if kind == "MultiOptimizer":
            if not hasattr(keras.optimizers, kind):
                return [[1.0, 1.0, 0.0]]
            optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer))
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=4), "mse")
        model.fit(np.ones((6, 2)), np.zeros((6, 1)), batch_size=2, verbose=0)
        return [np.concatenate([weight.ravel() for weight in model.get_weights()]).tolist()]

    assert two(fn) == [[[1.0, 1.0, 0.0]]] * 2


def test_averages_start_at_the_first_step_alone(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras

        def averages(optimizer: Any, passes: int, until: list[int]) -> list[float]:
            """The average after the passes, where each has the gradient -1, and ``until`` are ends of epochs."""
            found = []
            for number in range(1, passes + 1):
                optimizer.apply([keras.ops.convert_to_tensor([-1.0])], [weight])
                if number in until:
                    optimizer.complete_passes()
                average = optimizer._model_variables_moving_average[0]
                found.append(float(keras.ops.convert_to_numpy(average)[0]))
            return found

        def made() -> Any:
            return keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)

        def wrapped(optimizer: Any) -> Any:
            options = {"backward_passes_per_step": 3, "average_aggregated_gradients": True}
            return hvd.DistributedOptimizer(optimizer, **options)

        weight = keras.Variable([1.0])
        whole = averages(wrapped(made()), 6, [])
        weight = keras.Variable([1.0])
        short = averages(wrapped(made()), 4, [2, 3])
        weight = keras.Variable([1.0])
        plain = made()
        plain.apply([keras.ops.convert_to_tensor([-1.0])], [weight])  # a step, which is one iteration
        return [whole, short, averages(wrapped(plain), 3, [])]

    whole = [1.0, 1.0, 2.0, 2.0, 2.0, 2.5]
    assert two(fn) == [[whole, [1.0, 2.0, 2.5, 2.5], [2.0, 2.0, 2.5]]] * 2


@pytest.mark.parametrize("method", ["commit", "check_host_updates"])
def test_a_change_of_the_hosts_leaves_the_weights_as_they_are(two: Any, method: str) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        from hvd_cluster.elastic.loop import run_fn
        from hvd_cluster.elastic.state import HostUpdateResult

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, use_ema=True)), "mse")
        state = hvd.elastic.KerasState(model, calls=0)
        found: list[Any] = []

        def weights() -> Any:
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()
            return [weight.tolist() for weight in model.get_weights()]

        class Change(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 2:
                    found.append(weights())
                    state.on_hosts_updated(1.0, HostUpdateResult.added)
                    getattr(state, method)()

        def train(state: Any) -> None:
            if found:
                found.append(weights())
                return
            model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0, callbacks=[Change()])

        state.register_reset_callbacks([lambda: found.append(weights())])
        run_fn(train, lambda: None)(state)
        return [each == found[0] for each in found]

    assert two(fn) == [[True] * 3] * 2
