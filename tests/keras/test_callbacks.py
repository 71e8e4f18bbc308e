"""The callbacks in a fit of two ranks, the value operations, and the elastic state."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.version import Version

from hvd_cluster.errors import UnsupportedReductionError


def fitted(hvd: Any, *, callbacks: Any, optimizer: Any = None, epochs: int = 2, seed: int = 0) -> tuple[Any, Any]:
    """A small model that was fitted on two batches an epoch, and its history."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.01)), "mse")
    x = np.random.default_rng(hvd.rank()).normal(size=(16, 4)).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model, history.history


def test_ranks_that_begin_apart_end_together_with_rank_roots_weights(two: Any) -> None:
    fit = fitted

    def fn(hvd: Any) -> list[bool]:
        model, _ = fit(hvd, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)], seed=hvd.rank())
        gathered = [hvd.allgather(weight[None]) for weight in model.get_weights()]
        alone, _ = fit(hvd, callbacks=[], seed=1)
        same_start = all((a == b).all() for a, b in zip(model.get_weights(), alone.get_weights(), strict=True))
        return [all((both[0] == both[1]).all() for both in gathered), bool(same_start)]

    assert two(fn) == [[True, True]] * 2


def test_metrics_become_means_over_the_ranks(two: Any) -> None:
    fit = fitted

    def fn(hvd: Any) -> list[Any]:
        import keras

        own: list[float] = []

        class Before(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                own.append(float(logs["loss"]))

        _, history = fit(hvd, callbacks=[Before(), hvd.callbacks.MetricAverageCallback()])
        return [own, [float(value) for value in history["loss"]]]

    (own0, mean0), (own1, mean1) = two(fn)
    assert mean0 == mean1
    assert own0 != own1
    assert all(abs(m - (a + b) / 2) < 1e-6 for m, a, b in zip(mean0, own0, own1, strict=True))


def test_a_metric_with_a_value_for_each_class_is_averaged_class_by_class(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        own: list[Any] = []

        class Note(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                own.append([np.asarray(logs["f1_score"]).tolist(), type(logs["loss"])])

        model = keras.Sequential([keras.Input((3,)), keras.layers.Activation("softmax")])
        model.compile(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        x = np.eye(3, dtype="float32")[[0, 1, 2, 0]]
        y = np.eye(3, dtype="float32")[[0, 1, 2, 1] if hvd.rank() else [0, 1, 1, 0]]
        callbacks = [Note(), hvd.callbacks.MetricAverageCallback(), Note()]
        model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
        (before, _), (after, kind) = own
        return [before, after, kind is float]

    (own0, mean0, is_float0), (own1, mean1, is_float1) = two(fn)
    assert own0 != own1
    assert mean0 == mean1
    assert all(abs(m - (a + b) / 2) < 1e-6 for m, a, b in zip(mean0, own0, own1, strict=True))
    assert is_float0
    assert is_float1


def test_metrics_that_not_all_ranks_have_are_named_on_all_ranks(two: Any) -> None:
    def fn(hvd: Any) -> str:
        logs = {"loss": 1.0, "val_loss" if hvd.rank() else "accuracy": 2.0}  # as many, which would be averaged
        try:
            hvd.callbacks.MetricAverageCallback().on_epoch_end(3, logs)
        except ValueError as error:
            return str(error)
        return f"averaged: {logs}"

    (text, same) = two(fn)
    assert text == same
    assert text.startswith(
        "after epoch 3 rank 0 has the metrics ['accuracy', 'loss'] and rank 1 has ['loss', 'val_loss']"
    )


def test_the_learning_rate_warms_up_and_follows_its_schedule(two: Any) -> None:
    fit = fitted

    def fn(hvd: Any) -> list[Any]:
        import keras

        seen: list[float] = []

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                seen.append(round(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)), 6))

        _, history = fit(
            hvd,
            epochs=4,
            callbacks=[
                hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, steps_per_epoch=2),
                hvd.callbacks.LearningRateScheduleCallback(0.2, lambda epoch: 0.1 ** (epoch - 1), start_epoch=2),
                Watch(),
            ],
        )
        return [seen, [round(float(value), 6) for value in history["lr"]]]

    warm = [0.125, 0.15, 0.175, 0.2]
    assert two(fn) == [[[*warm, 0.02, 0.02, 0.002, 0.002], [0.15, 0.2, 0.02, 0.002]]] * 2


def momentums_around_a_change(hvd: Any, fit: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
    """The momentums before and after the schedule has halved the rate, at the first batch of the second epoch."""
    import keras
    import numpy as np

    momentums = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            there = getattr(self.model.optimizer, "momentums", [])  # none yet at first
            momentums.append([np.array(keras.ops.convert_to_numpy(each)) for each in there])

    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
    fit(hvd, optimizer=optimizer, callbacks=[Watch(), schedule, Watch()])
    before, after = momentums[4:6]
    assert any(abs(each).max() > 0 for each in before)
    return before, after


def test_momentum_is_corrected_when_the_rate_changes(two: Any) -> None:
    fit, around = fitted, momentums_around_a_change

    def fn(hvd: Any) -> list[float]:
        import keras

        before, after = around(hvd, fit, keras.optimizers.SGD(0.1, momentum=0.9))
        return [float(abs(b - 0.5 * a).max()) for a, b in zip(before, after, strict=True)]

    for errors in two(fn):
        assert max(errors) < 1e-6


@pytest.mark.skipif(
    find_spec("keras") is not None and Version(version("keras")) < Version("3.10"), reason="this Keras has no Muon"
)
def test_a_momentum_that_does_not_hold_the_rate_is_left_alone(two: Any) -> None:
    fit, around = fitted, momentums_around_a_change

    def fn(hvd: Any) -> bool:
        import keras

        before, after = around(hvd, fit, keras.optimizers.Muon(0.1))
        return all((a == b).all() for a, b in zip(before, after, strict=True))

    assert two(fn) == [True, True]


def test_values_are_reduced_gathered_and_broadcast(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        r = hvd.rank()
        half = hvd.allreduce(np.float32([1.0, 2.0 * r]), compression=hvd.Compression.fp16)
        with pytest.raises(UnsupportedReductionError, match="not PRODUCT"):
            hvd.reducescatter(np.arange(4.0), op=hvd.Product)
        return [
            float(hvd.allreduce(2.0 * r)),
            hvd.allreduce(np.arange(3) + r, op=hvd.Sum).tolist(),
            half.tolist(),
            str(half.dtype),
            hvd.allgather([[r]] * (r + 1)).tolist(),
            float(hvd.broadcast(keras.Variable(float(r)), 1)),
            hvd.reducescatter(np.arange(4.0), op=hvd.Sum).tolist(),
        ]

    shared = [1.0, [1, 3, 5], [1.0, 1.0], "float32", [[0], [1], [1]], 1.0]
    assert two(fn) == [[*shared, [0.0, 2.0]], [*shared, [4.0, 6.0]]]


def test_an_elastic_state_is_saved_restored_and_made_equal(two: Any) -> None:
    fit = fitted

    def fn(hvd: Any) -> list[Any]:
        import numpy as np

        model, _ = fit(hvd, callbacks=[])
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
        kept = [weight.copy() for weight in model.get_weights()]
        x = np.ones((16, 4), "float32")
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        epochs = state.epoch
        moved = any((a != b).any() for a, b in zip(kept, model.get_weights(), strict=True))
        state.restore()
        back = all((a == b).all() for a, b in zip(kept, model.get_weights(), strict=True))
        model.set_weights([weight + hvd.rank() for weight in kept])
        state.epoch = 5 + hvd.rank()
        state.sync()
        equal = all((a == b).all() for a, b in zip(kept, model.get_weights(), strict=True))
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=[commit])
        return [epochs, bool(moved), bool(back), bool(equal), state.epoch, state.num_commits]

    # Committed behind the second batch, and with the epoch; the fourth batch is the epoch's end.
    assert two(fn) == [[3, True, True, True, 5, 2]] * 2


def test_the_epochs_of_a_state_are_counted_whatever_number_a_fit_begins_with(two: Any) -> None:
    fit = fitted

    def fn(hvd: Any) -> list[int]:
        import numpy as np

        model, _ = fit(hvd, callbacks=[])
        state = hvd.elastic.KerasState(model, epoch=1)
        x = np.ones((8, 4), "float32")
        callbacks = [hvd.elastic.UpdateEpochStateCallback(state)]
        model.fit(x, x[:, :1], epochs=3, initial_epoch=state.epoch, verbose=0, callbacks=callbacks)
        resumed = state.epoch
        model.fit(x, x[:, :1], epochs=5 - state.epoch, verbose=0, callbacks=callbacks)
        return [resumed, state.epoch]

    assert two(fn) == [[3, 5]] * 2


def test_a_model_with_dropout_continues_behind_a_step_that_failed(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        from hvd_cluster.engine import basics
        from hvd_cluster.errors import HorovodInternalError

        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        state = hvd.elastic.KerasState(model)
        x = np.ones((16, 4), "float32")

        def fit() -> list[Any]:
            model.fit(x, x[:, :1], batch_size=4, verbose=0)
            return [weight.tolist() for weight in model.get_weights()]

        undisturbed = fit()
        state.restore()
        engine = basics.engine()
        submit, texts = engine.submit, []
        for num_steps in (2, 0):  # fails in the third step, and in the first
            left = [num_steps]

            def failing(request: Any, left: Any = left, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise HorovodInternalError("a worker is gone")
                return submit(request, **options)

            engine.submit = failing
            try:
                fit()
            except Exception as error:  # noqa: BLE001 - each backend has its own
                texts.append("a worker is gone" in str(error))
            finally:
                del engine.submit
            state.restore()
        return [*texts, fit() == undisturbed]

    assert two(fn) == [[True, True, True]] * 2


def test_a_restored_state_drops_the_token_that_a_failed_step_on_a_gpu_leaves(two: Any, backend: str) -> None:
    if backend != "jax":
        pytest.skip("only JAX orders callbacks by tokens")
    fit = fitted

    def fn(hvd: Any) -> bool:
        import numpy as np
        from jax._src.dispatch import runtime_tokens

        model, _ = fit(hvd, callbacks=[])
        state = hvd.elastic.KerasState(model)
        runtime_tokens.current_tokens = dict.fromkeys(runtime_tokens.current_tokens)  # None is refused
        had_tokens = bool(runtime_tokens.current_tokens)
        state.restore()
        model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), verbose=0)
        return had_tokens

    assert two(fn) == [True, True]


def test_a_resumed_epoch_is_shorter_by_the_batches_that_are_done(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        x = np.ones((32, 4), "float32")

        def seen(begin: dict[str, int], **options: Any) -> list[Any]:
            """The length of each epoch, where the state stands, and its commits."""
            state = hvd.elastic.KerasState(model, **begin)
            steps: list[int] = []

            class Count(keras.callbacks.Callback):
                def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                    steps.append(0)

                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    steps[-1] += 1

            callbacks = [
                Count(),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                *options.pop("callbacks", []),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
            ]
            model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0, callbacks=callbacks, **options)
            return [steps, state.epoch, state.batch, state.num_commits]

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.model.stop_training = True

        return [
            seen({"epoch": 0, "batch": 0}, epochs=2),
            seen({"epoch": 1, "batch": 6}, epochs=2),
            seen({"epoch": 1, "batch": 11}, epochs=2),  # of a larger world, whose epochs had more batches
            seen({"epoch": 1, "batch": 6}, epochs=3, callbacks=[Stop()]),
        ]

    assert two(fn) == [[[[8, 8], 2, 0, 4], [[2, 8], 3, 0, 4], [[1, 8], 3, 0, 4], [[2], 2, 0, 1]]] * 2


def test_a_checkpoint_of_the_best_model_needs_a_path(two: Any) -> None:
    fit = fitted

    def fn(hvd: Any) -> bool:
        import tempfile
        from pathlib import Path

        try:
            fit(hvd, callbacks=[hvd.callbacks.BestModelCheckpoint(monitor="loss")])
        except ValueError:
            with tempfile.TemporaryDirectory() as folder:
                best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
                best.filepath = f"{folder}/best.keras"
                fit(hvd, callbacks=[best])
                return Path(best.filepath).exists()
        return False

    assert two(fn) == [True, True]


def test_weights_that_rank_zero_restores_in_a_later_callback_reach_every_rank(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        def ends(hook: str) -> bool:
            def restore(self: Any, *_: Any, **__: Any) -> None:
                if hvd.rank() == 0 and not self.is_done:
                    self.model.set_weights([np.full((4, 1), 7.0, "float32"), np.full(1, 7.0, "float32")])
                self.is_done = True

            later = type("Later", (keras.callbacks.Callback,), {hook: restore, "is_done": False})()
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
            x = np.ones((16, 4), "float32")
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), later]
            model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
            variables = [*model.get_weights(), *map(keras.ops.convert_to_numpy, model.optimizer.variables)]
            equal = all(len(np.unique(hvd.allgather(np.asarray(each)[None]), axis=0)) == 1 for each in variables)
            return bool(equal and model.get_weights()[1][0] > 6)

        return [ends(hook) for hook in ("on_train_begin", "on_epoch_begin", "on_train_batch_begin")]

    assert two(fn) == [[True] * 3] * 2


def test_the_broadcast_after_the_first_batch_leaves_each_rank_the_gradients_it_has_summed(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        optimizer = keras.optimizers.SGD(1.0)
        model.compile(
            hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, average_aggregated_gradients=True),
            lambda y_true, y_pred: keras.ops.mean(y_true * y_pred, axis=-1),
        )
        gradients = np.array([[1.0], [2.0]] if hvd.rank() == 0 else [[4.0], [8.0]], dtype="float32")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(np.ones((2, 1)), gradients, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
        return [float(weight) for weight in model.get_weights()[0].ravel()]

    assert two(fn) == [[-(1 + 2 + 4 + 8) / 4]] * 2


def test_a_program_that_takes_over_on_batch_end_keeps_its_local_tables(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import types

        import keras
        import numpy as np

        callback_class = hvd.callbacks.BroadcastGlobalVariablesCallback

        def table(callback: Any) -> Any:
            return callback.model.layers[0].trainable_variables[0]

        class Overriding(callback_class):
            def on_batch_end(self, batch: int, logs: Any = None) -> None:
                if not self.broadcast_done:
                    self.register_local_var(table(self))
                super().on_batch_end(batch, logs)

        class OverridingKerasName(callback_class):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.register_local_var(table(self))
                super().on_train_batch_end(batch, logs)

        patched = callback_class(0)
        original = patched.on_batch_end

        def replacement(self: Any, batch: int, logs: Any = None) -> None:
            self.register_local_var(table(self))
            original(batch, logs)

        patched.on_batch_end = types.MethodType(replacement, patched)

        def ends(callback: Any) -> list[Any]:
            model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(2, 1)])
            model.add(keras.layers.Flatten())
            model.add(keras.layers.Dense(1, use_bias=False))
            model.layers[0].set_weights([np.full((2, 1), 10.0 + hvd.rank(), "float32")])
            model.layers[-1].set_weights([np.full((1, 1), float(hvd.rank()), "float32")])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
            optimizer.register_local_var(model.layers[0].trainable_variables[0])
            model.compile(optimizer, "mse")
            model.fit(np.zeros((4, 1), "int32"), np.ones((4, 1)), batch_size=2, verbose=0, callbacks=[callback])
            return [float(weight.ravel()[0]) for weight in model.get_weights()] + [callback.broadcast_done]

        return [ends(callback) for callback in (Overriding(0), OverridingKerasName(0), patched, callback_class(0))]

    kept, broadcast = [[10.0, 0.0, True], [11.0, 0.0, True]], [10.0, 0.0, True]
    assert two(fn) == [[own] * 3 + [broadcast] for own in kept]


@pytest.mark.parametrize(
    ("name", "num_slots"), [("SGD", 0), ("Adam", 3), ("Adafactor", 3), ("LossScaleOptimizer", 1), ("MultiOptimizer", 1)]
)
def test_what_an_optimizer_keeps_for_local_variables_is_not_broadcast(two: Any, name: str, num_slots: int) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras

        optimizers = keras.optimizers
        if not hasattr(optimizers, name):
            return [num_slots, [1.0 + hvd.rank()], [1.0]]
        make = {
            "SGD": lambda: optimizers.SGD(0.5),  # has as many variables as the model, and no slots
            "Adam": lambda: optimizers.Adam(0.5, use_ema=True),
            "Adafactor": lambda: optimizers.Adafactor(0.5),
            "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.5, momentum=0.5)),
            "MultiOptimizer": lambda: optimizers.MultiOptimizer(
                optimizers.OptimizerMap(optimizers.SGD(0.5, momentum=0.5))
            ),
        }
        # Tables of different sizes, which cannot be broadcast.
        table = keras.layers.Embedding(2 + hvd.rank(), 2)
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(1, use_bias=False)]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        model.compile(hvd.DistributedOptimizer(make[name](), backward_passes_per_step=2), "mse")
        model.optimizer.build(model.trainable_variables)
        variables = [*model.weights, *model.optimizer.variables]
        for each in variables:
            each.assign(keras.ops.full(each.shape, 1 + hvd.rank(), each.dtype))
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=table.trainable_variables)
        callback.set_model(model)
        callback.on_batch_begin(0)
        found: dict[bool, list[float]] = {True: [], False: []}
        for each in variables:
            is_own = "embeddings" in each.path or "hvd_" in each.path
            found[is_own].append(float(keras.ops.convert_to_numpy(each).max()))
        num_found = sum("embeddings" in each.path and "hvd_" not in each.path for each in model.optimizer.variables)
        return [num_found, sorted(set(found[True])), sorted(set(found[False]))]

    assert two(fn) == [[num_slots, [own], [1.0]] for own in (1.0, 2.0)]


@pytest.mark.skipif(not (find_spec("keras") and find_spec("tensorflow")), reason="needs keras and its default backend")
def test_each_callback_acts_in_the_methods_that_programs_override() -> None:
    import hvd_cluster.keras as hvd

    callbacks, elastic = hvd.callbacks, hvd.elastic
    methods = {
        callbacks.BroadcastGlobalVariablesCallback: {"on_batch_begin", "on_batch_end"},
        callbacks.MetricAverageCallback: {"on_epoch_end"},
        callbacks.LearningRateScheduleCallback: {"on_train_begin", "on_epoch_begin", "on_batch_begin", "on_epoch_end"},
        callbacks.LearningRateWarmupCallback: {"on_epoch_end"},
        callbacks.BestModelCheckpoint: {"on_train_begin"},
        elastic.CommitStateCallback: {"on_train_begin", "on_batch_end", "on_epoch_end"},
        elastic.UpdateBatchStateCallback: {"on_train_begin", "on_batch_end", "on_epoch_end"},
        elastic.UpdateEpochStateCallback: {"on_epoch_end"},
    }
    for callback, names in methods.items():
        assert {name for name in vars(callback) if name.startswith("on_")} == names, callback.__name__


def test_the_end_of_a_warm_up_is_a_line_on_the_standard_output_of_rank_zero(two: Any) -> None:
    fit = fitted

    def fn(hvd: Any) -> str:
        import contextlib
        import io

        output = io.StringIO()
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, steps_per_epoch=2, verbose=1)
        with contextlib.redirect_stdout(output):
            fit(hvd, epochs=3, callbacks=[warmup])
        return output.getvalue()

    assert two(fn) == ["\nEpoch 2: finished gradual learning rate warmup to 0.2.\n", ""]


def test_values_that_cannot_be_sent_are_refused_with_what_to_do(backend: str, two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import keras

        def refusal(call: Any) -> str:
            try:
                call()
            except ValueError as error:
                return str(error)
            return "accepted"

        found = [refusal(lambda: hvd.broadcast("text", 0)), refusal(lambda: hvd.allreduce({"loss": 1.0}))]
        x = keras.ops.ones((2,))
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            found.append(refusal(lambda: tf.function(hvd.allreduce, autograph=False)(x)))
        if keras.backend.backend() == "jax":
            import jax

            found.append(refusal(lambda: jax.jit(hvd.allreduce)(x)))
        return found

    for text, mapping, *compiled in two(fn):
        assert text.startswith("values of dtype <U4 are not supported by collectives: use hvd.broadcast_object() or")
        assert mapping.endswith("use hvd.broadcast_object() or hvd.allgather_object()")
        assert len(compiled) == (backend != "torch")
        assert all("while a step is compiled: call it between steps, in a callback" in each for each in compiled)
