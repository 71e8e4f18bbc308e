"""Checkpoints within epochs of KerasEstimator: fits that go on amid an epoch end as undisturbed ones, bit for bit."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest
from keras_driver import ENVIRONMENT

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def net(**compiled):
    """With dropout and running means: what a restart could get wrong."""
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3, "softmax")])
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **compiled)
    return model


def fitted(frame, backend, folder, run_id, act, compiled=None, more=(), **params):
    """A fit of 3 epochs, of 11 steps each on two workers, saved every 3 steps.

    Args:
        act: called with the rank, the epoch and the batch at the end of each batch.
        compiled: further arguments of ``compile``.
        more: further callbacks.
    """
    from pathlib import Path

    import keras

    import hvd_cluster.keras as hvd
    from hvd_cluster.estimators import KerasEstimator

    class Watches(keras.callbacks.Callback):
        """Writes down what it is told of, by rank, and acts."""

        def on_train_begin(self, logs=None):
            self.note("begin", self.params["steps"], self.params["epochs"])

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            self.note("batch", self.epoch, batch)

        def on_train_batch_end(self, batch, logs=None):
            act(hvd.rank(), self.epoch, batch)

        def on_epoch_end(self, epoch, logs=None):
            self.note("epoch", epoch, self.model.stop_training)

        def on_train_end(self, logs=None):
            self.note("end")

        def note(self, *words):
            with Path(folder, f"{run_id}.{hvd.rank()}").open("a") as file:
                print(*words, file=file)

    warm = hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=2)
    given = {
        "feature_cols": ["x"],
        "label_cols": ["c"],
        "batch_size": 8,
        "epochs": 3,
        "validation": 0.2,
        "random_seed": 5,
        "verbose": 0,
        "checkpoint_every_steps": 3,
        "callbacks": [warm, Watches(), *more],
        "store": f"{folder}/store",
        **params,
    }
    return KerasEstimator(model=net(**(compiled or {})), backend=backend, run_id=run_id, **given).fit(frame)


def copies(folder, source, target, epoch, batch):
    """At the end of a batch, make what is saved of one run by then the checkpoint of another."""

    def act(rank, now, at):
        import shutil
        from pathlib import Path

        if rank == 0 and (now, at) == (epoch, batch):
            Path(folder, "store/runs", target).mkdir(parents=True)
            shutil.copy(f"{folder}/store/runs/{source}/checkpoint", f"{folder}/store/runs/{target}/checkpoint")

    return act


def nothing(rank, epoch, batch):
    """Of the undisturbed."""


def learned(model):
    """Weights and the history's numbers, to compare without tolerance."""
    return [weights.tolist() for weights in model.getModel().get_weights()], model.getHistory()


def batches(path):
    """Epoch and batch of each line that tells of a batch."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(words[1]), int(words[2])) for words in lines if words[0] == "batch"]


#: Params, arguments of compile, steps of an epoch, those made at a checkpoint, and the batch that ends next behind it.
VARIANTS = {
    "plainly": ({}, {}, 11, 6, 6),
    # Not after 3 steps, amid a group of two.
    "amid passes": ({"backward_passes_per_step": 2}, {}, 11, 6, 6),
    # 11 steps an epoch are no whole groups of two.
    "between epochs, amid passes": ({"backward_passes_per_step": 2}, {}, 11, 0, 0),
    "several steps at once": ({"train_steps_per_epoch": 12}, {"steps_per_execution": 2}, 12, 6, 7),
    "more steps at once than between checkpoints": (
        {"train_steps_per_epoch": 12},
        {"steps_per_execution": 4},
        12,
        8,
        11,
    ),
    # After 3 steps a checkpoint is due, and a group of two has begun.
    "passes that end amid several steps at once": (
        {"train_steps_per_epoch": 12, "backward_passes_per_step": 2, "checkpoint_every_steps": 2},
        {"steps_per_execution": 3},
        12,
        6,
        8,
    ),
}


@pytest.mark.parametrize(
    "variant", ["plainly", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "plainly")]
)
def test_a_fit_that_resumes_in_mid_epoch_ends_as_an_undisturbed_one(driver, backend, frame, tmp_path, variant):
    params, compiled, steps, done, next_batch = VARIANTS[variant]
    if ("backward_passes_per_step" in params and backend == "jax") or (compiled and backend == "torch"):
        pytest.skip(f"not available on {backend}")
    fit, watch, read, idle = fitted, copies, learned, nothing

    def fn(workers, frame, folder):
        taken = watch(folder, "one", "two", 1, next_batch)
        straight = fit(frame, workers(2), folder, "one", taken, compiled, **params)
        resumed = fit(frame, workers(2), folder, "two", idle, compiled, **params)
        return read(straight), read(resumed)

    straight, resumed = driver(fn, frame, str(tmp_path))
    assert set(straight[1]) >= {"loss", "accuracy", "val_loss", "val_accuracy", "lr"}
    assert resumed == straight
    at_once = compiled.get("steps_per_execution", 1)
    firsts = [(epoch, batch) for epoch in range(3) for batch in range(0, steps, at_once)]
    for rank in (0, 1):
        told = (tmp_path / f"two.{rank}").read_text().splitlines()
        assert batches(tmp_path / f"one.{rank}") == firsts
        assert batches(tmp_path / f"two.{rank}") == [at for at in firsts if at >= (1, done)]
        assert [line for line in told if not line.startswith("batch")] == [
            f"begin {steps} 3",
            "epoch 1 False",
            "epoch 2 False",
            "end",
        ]


@pytest.mark.parametrize("size", [1, 2])
def test_what_callbacks_do_to_variables_before_an_epoch_is_done_once(driver, frame, tmp_path, size):
    """A run of one worker, which resumes in mid-epoch, or repeats the epoch on two."""
    fit, watch, read, idle = fitted, copies, learned, nothing

    def fn(workers, frame, folder, size):
        import keras

        class Halves(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                mean = self.model.layers[1].moving_mean
                mean.assign(0.5 * mean)

        def trained(size, run_id, act):
            more = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5), Halves()]
            given = {"checkpoint_every_steps": 1, "train_steps_per_epoch": 4, "validation": 0.0}
            return read(fit(frame, workers(size), folder, run_id, act, more=more, **given))

        # The rate is that of the warm-up until the third epoch.
        return trained(1, "one", watch(folder, "one", "two", 2, 1)), trained(size, "two", idle)

    straight, resumed = driver(fn, frame, str(tmp_path), size)
    assert batches(tmp_path / "two.0")[0] == (2, 1 if size == 1 else 0)
    if size == 1:
        assert resumed == straight
    assert resumed[1]["lr"][-1] == size * straight[1]["lr"][-1]


def test_another_number_of_workers_makes_the_steps_that_are_left(driver, frame, tmp_path):
    fit, watch, idle = fitted, copies, nothing

    def fn(workers, frame, folder):
        fit(frame, workers(2), folder, "one", watch(folder, "one", "two", 2, 7))
        resumed = fit(frame, workers(1), folder, "two", idle)
        return int(resumed.getModel().optimizer.iterations), resumed.getHistory()

    iterations, history = driver(fn, frame, str(tmp_path))
    # 6 of 11 global batches of 16 are 12 of 21 batches of 8.
    assert batches(tmp_path / "two.0") == [(2, batch) for batch in range(12, 21)]
    assert iterations == 11 + 11 + 6 + 9
    assert len(history["loss"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("last", [10, 8])
def test_a_callback_stops_a_fit_that_began_in_mid_epoch(driver, frame, tmp_path, last):
    """At the end of that epoch, and amid it."""
    fit, watch, read, idle = fitted, copies, learned, nothing

    def fn(workers, frame, folder):
        import keras

        class Stops(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = epoch

            def on_train_batch_end(self, batch, logs=None):
                if (self.epoch, batch) == (1, last):
                    self.model.stop_training = True

        straight = fit(frame, workers(2), folder, "one", watch(folder, "one", "two", 1, 6), more=[Stops()])
        resumed = fit(frame, workers(2), folder, "two", idle, more=[Stops()])
        return read(straight), read(resumed)

    straight, resumed = driver(fn, frame, str(tmp_path))
    assert resumed == straight
    assert len(resumed[1]["loss"]) == 2
    assert batches(tmp_path / "two.0") == [(1, batch) for batch in range(6, last + 1)]
    assert (tmp_path / "two.0").read_text().splitlines()[-2:] == ["epoch 1 True", "end"]


@pytest.mark.parametrize("stops", ["at a loss that is no number", "in a step", "after an epoch"])
def test_a_callback_that_stops_one_rank_stops_all_of_them(driver, frame, tmp_path, stops):
    """In its own step: the others would wait for it in the next one."""
    fit, idle = fitted, nothing

    def fn(workers, frame, folder, stops):
        import keras
        import numpy as np

        import hvd_cluster.keras as hvd

        class Stops(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if stops == "after an epoch":
                    self.model.stop_training = hvd.rank() == 1

        class StopsInStep(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = hvd.rank() == 1 and batch == 4

        if stops == "at a loss that is no number":
            more = [keras.callbacks.TerminateOnNaN()]
            rows = list(frame["x"])
            rows[100] = np.full(4, np.inf, "float32")
            frame = frame.assign(x=rows, v=np.arange(len(rows)) % 5 == 1)
        else:
            more = [StopsInStep() if stops == "in a step" else Stops()]
        given = {"more": more, "validation": "v", "checkpoint_every_steps": 1}
        model = fit(frame, workers(2), folder, "one", idle, **given)
        again = fit(frame, workers(2), folder, "one", idle, **given)
        return len(model.getHistory()["loss"]), len(again.getHistory()["loss"])

    lengths = driver(fn, frame, str(tmp_path), stops)
    assert lengths == (1, 1)
    made = [batches(tmp_path / f"one.{rank}") for rank in (0, 1)]
    assert made[0] == made[1]
    assert {epoch for epoch, _ in made[0]} == {0}
    if stops == "in a step":
        assert made[0] == [(0, batch) for batch in range(5)]


def test_a_loss_that_is_not_finite_ends_the_fit_on_all_ranks(driver, frame, tmp_path):
    fit, idle = fitted, nothing

    def fn(workers, frame, folder):
        import numpy as np

        from hvd_cluster.errors import WorkerFailedError

        rows = list(frame["x"])
        rows[::10] = [np.full(4, np.inf, "float32")] * len(rows[::10])
        try:
            fit(frame.assign(x=rows), workers(2), folder, "one", idle, store=folder)
        except WorkerFailedError as error:
            return str(error)
        return ""

    text = driver(fn, frame, str(tmp_path))
    assert "terminate_on_nan is set" in text
    assert " of epoch 0" in text
    assert "feature column 'x' holds infinities in " in text
    assert "raised hvd_cluster.errors.DataError" in text.rpartition("Of the others")[2]


@pytest.mark.parametrize("ends", ["after its epochs", "by a callback"])
def test_a_finished_fit_that_is_repeated_returns_the_same_averages(driver, frame, tmp_path, ends):
    fit, read, idle = fitted, learned, nothing

    def fn(workers, frame, folder, ends):
        import keras

        class Stops(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = ends == "by a callback"

        def made():
            optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
            return fit(frame, workers(1), folder, "one", idle, more=[Stops()], optimizer=optimizer, epochs=2)

        return read(made()), read(made())

    first, again = driver(fn, frame, str(tmp_path), ends)
    assert len(first[1]["loss"]) == (1 if ends == "by a callback" else 2)
    assert again == first


@pytest.mark.slow
@pytest.mark.timeout(300)  # workers start three times over
def test_a_worker_that_is_killed_in_mid_epoch_costs_the_steps_behind_the_last_checkpoint(driver, frame, tmp_path):
    fit, read, idle = fitted, learned, nothing

    def fn(workers, frame, folder, env):
        from pathlib import Path

        from hvd_cluster.estimators import LocalBackend

        def dies(rank, epoch, batch):
            import os
            import signal

            flag = Path(folder, "died")
            if (rank, epoch, batch) == (1, 1, 7) and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        disturbed = fit(frame, LocalBackend(2, env=env, verbose=0), folder, "one", dies)
        return Path(folder, "died").exists(), read(disturbed), read(fit(frame, workers(2), folder, "two", idle))

    died, disturbed, undisturbed = driver(fn, frame, str(tmp_path), ENVIRONMENT)
    assert died
    assert disturbed == undisturbed
    whole = batches(tmp_path / "two.1")
    before, after = [at for at in whole if at <= (1, 7)], [at for at in whole if at >= (1, 6)]
    assert batches(tmp_path / "one.1") == before + after


def test_a_file_that_is_written_every_few_batches_is_written_behind_the_same_ones(driver, tmp_path):
    build = net

    def fn(workers, folder):
        import keras

        from hvd_cluster.estimators.keras.callback_states import CallbackStates
        from hvd_cluster.estimators.run.checkpoint import packed, unpacked

        model = build()

        def writer():
            path = f"{folder}/{{batch}}.weights.h5"
            callback = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=4)
            callback.set_model(model)
            callback.on_epoch_begin(0)
            return callback

        before, after = writer(), writer()
        for batch in range(6):
            before.on_train_batch_end(batch, {})
        CallbackStates([after], unpacked(packed(CallbackStates([before], None).capture()))).restore()
        for batch in range(6, 12):
            after.on_train_batch_end(batch, {})

    driver(fn, str(tmp_path))
    assert sorted(int(path.name.split(".")[0]) for path in tmp_path.glob("*.h5")) == [4, 8, 12]
