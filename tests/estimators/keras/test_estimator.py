"""KerasEstimator in local processes, on each backend of Keras: models in, models out."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import cloudpickle
import pytest
from keras_driver import ENVIRONMENT

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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


def test_a_fit_reads_the_live_rows_of_a_table(driver, frame, tmp_path):
    deltalake, pyarrow = pytest.importorskip("deltalake"), pytest.importorskip("pyarrow")
    fit, apart = estimator, difference

    def fn(workers, path, rows):
        read, given = (fit(workers(1)).fit(data) for data in (path, rows))
        return apart(read, given), read.getHistory() == given.getHistory()

    rows = pyarrow.Table.from_pandas(frame.assign(number=range(len(frame))), preserve_index=False)
    deltalake.write_deltalake(str(tmp_path / "table"), rows)
    deltalake.DeltaTable(str(tmp_path / "table")).delete("number >= 40")
    assert driver(fn, str(tmp_path / "table"), rows.slice(0, 40)) == (0.0, True)


def test_a_fit_makes_the_steps_of_a_plain_loop(driver, frame, tmp_path):
    """Several outputs, weights of losses and of rows, and steps of whole batches that the reader gives."""
    fit, build = estimator, dense

    def fn(workers, frame, folder):
        import keras

        from hvd_cluster.data.materializing import materialize
        from hvd_cluster.data.reader import ParquetReader
        from hvd_cluster.data.store import Store

        given = {"label_cols": ["y", "w"], "loss": ["mse", "mae"], "loss_weights": [1.0, 0.5], "sample_weight_col": "w"}
        fitted = fit(workers(2), build(outputs=2, compile=False), optimizer=keras.optimizers.Adam(0.01), **given).fit(
            frame
        )
        loop = build(outputs=2, compile=False)
        loop.compile(keras.optimizers.Adam(0.01), ["mse", "mae"], loss_weights=[1.0, 0.5])
        data = materialize(frame, Store.create(folder), columns=["x", "a", "y", "w"], num_proc=1, seed=5)
        reader = ParquetReader(
            data.train, data.schema, data.store, batch_size=16, seed=5, shuffle=True, remainder="pad"
        )
        for epoch in range(2):
            for batch in reader.epoch(epoch):
                x, a, y, w = (batch[name].numpy().astype("float32") for name in ("x", "a", "y", "w"))
                loop.train_on_batch((x, a[:, None]), (y[:, None], w[:, None]), sample_weight=(w, w))
        pairs = zip(fitted.getModel().get_weights(), loop.get_weights(), strict=True)
        scored = fitted.transform(frame)
        return max(float(abs(a - b).max()) for a, b in pairs), [name for name in scored if name.endswith("__output")]

    apart, outputs = driver(fn, frame, str(tmp_path))
    assert apart < 1e-5
    assert outputs == ["y__output", "w__output"]


def test_a_run_that_is_resumed_ends_with_the_weights_of_an_undisturbed_one(driver, frame, tmp_path):
    fit, build, apart = estimator, dense, difference

    def fn(workers, frame, folder):
        from hvd_cluster.data.store import Store
        from hvd_cluster.estimators.run.checkpoint import Checkpoint
        from hvd_cluster.estimators.run.fingerprint import Fingerprint
        from hvd_cluster.estimators.run.run_files import RunFiles

        def fitted(store, run_id, epochs, **params):
            params = {"store": f"{folder}/{store}", "run_id": run_id, "epochs": epochs, **params}
            # Weights and masks of the dropout are drawn from what the model and the run have been given.
            return fit(workers(2), build(dropout=0.3), **params).fit(frame)

        straight = fitted("a", "one", 4)
        first = fitted("b", "two", 2)
        resumed = fitted("b", "two", 4)
        refused = []
        foreign = Checkpoint({"lightning": []}, [], 2, Fingerprint(["x", "a"], ["y"], {}, 203))
        foreign.save(RunFiles(Store.create(f"{folder}/b"), "other"))
        for act in (
            lambda: fit(workers(2), build(), store=f"{folder}/b", run_id="two").fit(frame[:100]),
            lambda: fit(workers(2), build(), store=f"{folder}/b", run_id="other").fit(frame),
            lambda: fit(workers(2), build(outputs=2), label_cols=["y", "w"], store=f"{folder}/b", run_id="two").fit(
                frame
            ),
        ):
            try:
                act()
            except ValueError as error:
                refused.append(str(error))
        return {
            "moved": apart(first, resumed),
            "apart": apart(straight, resumed),
            "losses": [each.getHistory()["loss"] for each in (straight, resumed)],
            "steps": int(resumed.getModel().optimizer.iterations),
            "refused": refused,
        }

    found = driver(fn, frame, str(tmp_path))
    assert found["moved"] > 1e-3
    assert found["apart"] == 0
    assert found["losses"][0] == found["losses"][1]
    assert found["steps"] == 4 * 13
    assert "203 rows and has 100" in found["refused"][0]
    assert "another framework" in found["refused"][1]
    assert "another model or optimizer" in found["refused"][2]
    assert len(found["refused"]) == 3


def test_the_learning_rate_is_scaled_by_the_workers_and_returned_as_it_was(driver, frame):
    fit, build = estimator, dense

    def fn(workers, frame):
        import keras

        import hvd_cluster.keras as hvd

        class Mine(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                return 0.1

            def get_config(self):
                return {}

        class EpochTimer(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                logs["rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 13, 0.5, staircase=True)
        warm = hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1)
        found = []
        for optimizer, callbacks in (
            (keras.optimizers.SGD(0.05), []),
            (keras.optimizers.SGD(decay), []),
            (keras.optimizers.SGD(0.05), [warm]),
        ):
            model = fit(
                workers(2), build(compile=False), optimizer=optimizer, loss="mse", scale_lr=True,
                callbacks=[*callbacks, EpochTimer()],
            ).fit(frame)  # fmt: skip
            left = float(keras.ops.convert_to_numpy(keras.Variable(model.getModel().optimizer.learning_rate)))
            found.append([model.getHistory()["rate"], left])
        try:
            fit(
                workers(2),
                build(compile=False),
                optimizer=keras.optimizers.SGD(Mine()),
                loss="mse",
                custom_objects={"Mine": Mine},
                scale_lr=True,
            ).fit(frame)
        except ValueError as error:
            found.append("set scale_lr=False" in str(error))
        return found

    constant, decayed, warm, refused = driver(fn, frame)
    assert constant == [pytest.approx([0.1, 0.1]), pytest.approx(0.05)]
    # After 13 and 26 steps.
    assert decayed == [pytest.approx([0.1, 0.05]), pytest.approx(0.025)]
    assert warm[0] == pytest.approx([0.1, 0.1])
    assert refused is True


def test_the_history_says_that_a_rank_waited_for_the_other(driver, frame):
    build, fit = dense, estimator

    def fn(workers, frame):
        import time

        import keras

        class Late(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                import hvd_cluster.torch as hvd

                if hvd.rank() == 1:
                    time.sleep(0.05)

        return fit(workers(2), build(), callbacks=[Late()]).fit(frame).history.to_dict("list")

    found = driver(fn, frame)
    shares = {name.removeprefix("time_share_"): found[name][-1] for name in found if name.startswith("time_share_")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["late"] > 0.25  # of both ranks: rank 0 waits for most of each step, and rank 1 for nothing


def test_callbacks_see_the_same_numbers_on_all_ranks_and_stop_all_of_them(driver, frame, tmp_path):
    fit, build = estimator, dense

    def fn(workers, frame, folder):
        import keras

        class Writes(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                from pathlib import Path

                import hvd_cluster.keras as hvd

                Path(folder, f"{hvd.rank()}.{epoch}").write_text(f"{logs['loss']} {logs['val_loss']}")

        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=1e9)
        model = fit(workers(2), build(), validation=0.3, epochs=9, callbacks=[stop, Writes()]).fit(frame)
        return model.getHistory()

    history = driver(fn, frame, str(tmp_path))
    assert len(history["loss"]) == 2
    for epoch in (0, 1):
        assert len({(tmp_path / f"{rank}.{epoch}").read_text() for rank in (0, 1)}) == 1
        assert (tmp_path / f"0.{epoch}").read_text() == f"{history['loss'][epoch]} {history['val_loss'][epoch]}"


def test_a_run_that_a_callback_has_ended_stays_ended(driver, frame, tmp_path):
    fit, build, apart = estimator, dense, difference

    def fn(workers, frame, folder):
        import keras

        def fitted(epochs, run_id):
            stop = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True, min_delta=0.3)
            slow = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=2, min_delta=0.3)
            given = {"validation": "v", "callbacks": [stop, slow], "store": folder, "run_id": run_id}
            return fit(workers(2), build(lr=0.02), epochs=epochs, **given).fit(frame)

        straight, again = fitted(30, "one"), fitted(30, "one")
        length = len(straight.getHistory()["loss"])
        fitted(length - 2, "two")  # amid what both of them wait for
        resumed = fitted(30, "two")
        histories = [each.getHistory() for each in (straight, again, resumed)]
        return length, [apart(straight, each) for each in (again, resumed)], histories

    length, distances, (straight, again, resumed) = driver(fn, frame, str(tmp_path))
    assert 5 < length < 30
    assert straight["learning_rate"][-1] < straight["learning_rate"][0]
    assert distances == [0, 0]
    assert straight == again == resumed


def test_a_data_module_of_the_users_own_brings_each_batch_once_in_its_order(driver, frame):
    fit, build = estimator, dense

    def fn(workers, frame):
        import numpy as np

        from hvd_cluster.estimators import DataModule

        def batch(step):
            rows = np.random.default_rng(step).normal(size=(8, 6)).astype("float32")
            return {"x": rows[:, :4], "a": rows[:, 4], "y": rows[:, 5]}

        class Ten(DataModule):
            def train_data(self):
                return map(batch, range(10))

            def val_data(self):
                return None

        model = fit(workers(1), data_module=Ten, train_steps_per_epoch=4).fit(frame)
        loop = build()
        for step in range(8):  # two epochs
            given = batch(step)
            loop.train_on_batch((given["x"], given["a"][:, None]), given["y"][:, None])
        pairs = zip(model.getModel().get_weights(), loop.get_weights(), strict=True)
        return max(float(abs(a - b).max()) for a, b in pairs)

    assert driver(fn, frame) < 1e-6


def test_a_data_module_that_draws_random_numbers_continues_exactly(driver, frame, tmp_path):
    fit, build, apart = estimator, dense, difference

    def fn(workers, frame, folder):
        from hvd_cluster.estimators import DataModule

        class Drawn(DataModule):
            def train_data(self):
                import numpy as np

                for _ in range(5):
                    rows = np.random.normal(size=(8, 6)).astype("float32")
                    yield {"x": rows[:, :4], "a": rows[:, 4], "y": rows[:, 5]}

            def val_data(self):
                return None

        def fitted(epochs, run_id):
            given = {"data_module": Drawn, "train_steps_per_epoch": 4, "store": folder, "run_id": run_id}
            return fit(workers(1), build(dropout=0.3), epochs=epochs, **given).fit(frame)

        fitted(2, "two")
        return apart(fitted(3, "one"), fitted(3, "two"))

    assert driver(fn, frame, str(tmp_path)) == 0


def test_a_metric_of_several_numbers_is_one_of_each_in_the_history(driver, frame, tmp_path):
    fit = estimator

    def fn(workers, frame, folder):
        import keras

        class Sees(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                import json
                from pathlib import Path

                import hvd_cluster.keras as hvd

                told = {name: getattr(value, "tolist", lambda: None)() for name, value in logs.items()}
                Path(folder, f"{hvd.rank()}.{epoch}").write_text(json.dumps(told))

        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
        net.compile(keras.optimizers.Adam(0.05), "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        frame = frame.assign(hot=[[float(c == one) for one in range(3)] for c in frame["c"]])
        given = {"feature_cols": ["x"], "label_cols": ["hot"], "validation": 0.3, "callbacks": [Sees()]}
        model = fit(workers(2), net, store=folder, run_id="f1", **given).fit(frame)
        return model.getHistory(), list(model.history.columns)

    history, columns = driver(fn, frame, str(tmp_path))
    for part in ("", "val_"):
        assert {f"{part}f1_score_{index}" for index in range(3)} <= set(history)
        assert f"{part}f1_score" not in history
    assert {"train_f1_score_0", "validation_f1_score_2"} <= set(columns)
    for epoch in (0, 1):
        told = [json.loads((tmp_path / f"{rank}.{epoch}").read_text()) for rank in (0, 1)]
        assert told[0] == told[1]
        for name in ("f1_score", "val_f1_score"):
            assert told[0][name] == pytest.approx([history[f"{name}_{index}"][epoch] for index in range(3)])


def test_what_is_told_through_the_store_holds_the_step_and_the_epochs(driver, frame, tmp_path):
    fit = estimator

    def fn(workers, frame, folder):
        class OutOfReach(type(workers(1))):
            driver_is_out_of_reach = True

            def __init__(self, one):
                vars(self).update(vars(one))

        fit(OutOfReach(workers(1)), store=folder, run_id="one").fit(frame)

    driver(fn, frame, str(tmp_path))
    told = json.loads((tmp_path / "runs" / "one" / "progress.json").read_text())
    assert told["step"]["epoch"] == 1
    assert told["step"]["step"] == told["step"]["steps"]
    assert [record["epoch"] for record in told["records"]] == [0, 1]


def test_the_best_epoch_is_returned_where_a_checkpoint_asks_for_it(driver, frame, tmp_path):
    fit, build = estimator, dense

    def fn(workers, frame, folder):
        import keras
        import numpy as np

        import hvd_cluster.keras as hvd

        best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
        model = fit(
            workers(2), build(lr=0.6), validation="v", epochs=5, checkpoint_callback=best, store=folder, run_id="one"
        ).fit(frame)
        held_out = frame[frame["v"]]
        x, a = np.stack(held_out["x"]), held_out["a"].to_numpy("float32")[:, None]
        numbers = model.getModel().evaluate((x, a), held_out["y"].to_numpy()[:, None], verbose=0, return_dict=True)
        saved = keras.models.load_model(f"{folder}/runs/one/checkpoint.keras")
        same = all((a == b).all() for a, b in zip(saved.get_weights(), model.getModel().get_weights(), strict=True))
        return model.getHistory()["val_loss"], numbers["loss"], bool(same)

    losses, loss, same = driver(fn, frame, str(tmp_path))
    assert min(losses) < losses[-1]
    assert loss == pytest.approx(min(losses), rel=1e-4)
    assert same


def test_the_best_epoch_of_a_course_that_was_left_is_not_returned(driver, frame, tmp_path):
    fit, build, apart = estimator, dense, difference

    def fn(workers, frame, folder):
        from pathlib import Path

        import keras

        import hvd_cluster.keras as hvd

        class Spoils(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.set_weights([20 * weight for weight in self.model.get_weights()])

        def fitted(epochs, *more):
            best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
            given = {"validation": "v", "callbacks": list(more), "checkpoint_callback": best, "store": folder}
            return fit(workers(1), build(lr=0.001), epochs=epochs, run_id="one", **given).fit(frame)

        two = fitted(2)
        checkpoint = Path(folder, "runs/one/checkpoint")
        before = checkpoint.read_bytes()
        three = fitted(3)
        checkpoint.write_bytes(before)  # as a worker leaves it that has died before it saved the third epoch
        four = fitted(4, Spoils())
        return [each.getHistory()["val_loss"] for each in (three, four)], apart(two, four), apart(three, four)

    (left, losses), to_two, to_three = driver(fn, frame, str(tmp_path))
    assert left[2] < left[1] < left[0]
    assert losses[:2] == left[:2]
    assert min(losses[2:]) > left[0]
    assert to_two == 0
    assert to_three > 0


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["in a store", "with the driver"])
def test_the_best_epoch_outlives_the_worker_that_found_it(driver, frame, tmp_path, kept):
    fit, build, apart = estimator, dense, difference

    def fn(workers, frame, folder, env, kept):
        import os
        import signal
        from pathlib import Path

        import keras

        import hvd_cluster.keras as hvd
        from hvd_cluster.estimators import LocalBackend

        class Elsewhere(LocalBackend):
            is_far = kept == "with the driver"

        class Spoils(keras.callbacks.Callback):
            def __init__(self, flag=None):
                super().__init__()
                self.flag = flag

            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    self.model.set_weights([20 * weight for weight in self.model.get_weights()])

            def on_epoch_end(self, epoch, logs=None):
                if epoch == 2 and self.flag is not None and not Path(self.flag).exists():
                    Path(self.flag).touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        path = f"{folder}/rows.parquet"
        frame[["x", "a", "y"]].to_parquet(path)

        def fitted(name, flag=None):
            best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
            given = {"validation": 0.2, "epochs": 3, "callbacks": [Spoils(flag)], "checkpoint_callback": best}
            if kept == "in a store":
                given["store"] = f"{folder}/{name}"
            return fit(Elsewhere(1, env=env, verbose=0), build(), **given).fit(path)

        disturbed, undisturbed = fitted("a", f"{folder}/died"), fitted("b")
        return Path(folder, "died").exists(), apart(disturbed, undisturbed), disturbed.getHistory()["val_loss"]

    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}  # a killed worker leaves its folder behind
    died, distance, losses = driver(fn, frame, str(tmp_path), environment, kept)
    assert died
    assert min(losses) < losses[2]
    assert distance == 0


def test_layers_losses_and_compressors_of_the_users_own_travel(driver, frame, tmp_path):
    fit = estimator

    def fn(workers, frame, folder):
        import keras

        import hvd_cluster.keras as hvd
        from hvd_cluster.estimators import KerasEstimator, KerasModel

        class Twice(keras.layers.Layer):
            def call(self, x):
                return 2 * x

        def loss(y, p):
            return keras.ops.mean(keras.ops.abs(y - p), axis=-1)

        # Not built: its weights are made on the driver, when it is tried.
        model = keras.Sequential([Twice(), keras.layers.Dense(1)])
        params = {"feature_cols": ["x"], "optimizer": "sgd", "loss": loss, "custom_objects": {"Twice": Twice}}
        compression = hvd.Compression.fp16
        before = fit(None, model, num_proc=None, gradient_compression=compression, **params)
        before.save(f"{folder}/estimator")
        after = KerasEstimator.load(f"{folder}/estimator").setBackend(workers(2))
        fitted = after.fit(frame)
        fitted.save(f"{folder}/model")
        again = KerasModel.load(f"{folder}/model")
        same = again.transform(frame).equals(fitted.transform(frame))
        return [same, sorted(again.getCustomObjects()), again.getRunId() == fitted.getRunId(), model.built]

    assert driver(fn, frame, str(tmp_path)) == [True, ["Twice"], True, False]


@pytest.mark.slow
def test_what_a_fitted_model_saves_loads_without_this_package(driver, frame, tmp_path):
    fit = estimator

    def fn(workers, frame, folder):
        fit(workers(2), scale_lr=True).fit(frame).getModel().save(f"{folder}/model.keras")
        import subprocess
        import sys

        code = (
            "import sys; sys.modules['hvd_cluster'] = None; import keras\n"
            f"model = keras.models.load_model({folder!r} + '/model.keras')\n"
            "print(type(model.optimizer).__name__, int(model.optimizer.iterations), model.loss)"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert driver(fn, frame, str(tmp_path)).split() == ["SGD", "26", "mse"]


def test_a_model_may_take_and_return_dicts(driver, frame):
    fit = estimator

    def fn(workers, frame):
        import keras

        keras.utils.set_random_seed(1)
        x, a = keras.Input((2, 2), name="x"), keras.Input((), dtype="int32", name="c")
        embedded = keras.layers.Embedding(3, 2)(a)
        both = keras.layers.Concatenate()([keras.layers.Flatten()(x), embedded])
        outputs = {"one": keras.layers.Dense(1, name="one")(both), "three": keras.layers.Dense(3, name="three")(both)}
        model = keras.Model({"x": x, "c": a}, outputs)
        losses = {"one": "mse", "three": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        model.compile("adam", losses)
        fitted = fit(workers(2), model, feature_cols=["x", "c"], label_cols=["y", "c"], epochs=1).fit(frame)
        scored = fitted.transform(frame)
        return [len(scored["c__output"][0]), str(scored["y__output"].dtype), sorted(fitted.getHistory())[-1]]

    assert driver(fn, frame)[:2] == [3, "float32"]


def test_a_sequential_model_gets_a_column_in_the_shape_of_its_input(driver, frame):
    fit = estimator

    def fn(workers, frame):
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Conv2D(3, 2), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
        fitted = fit(workers(1), model=model, feature_cols=["x"], epochs=1).fit(frame)
        expected = fitted.getModel().predict(np.stack(frame["x"]).reshape(-1, 2, 2, 1), verbose=0).ravel()
        return float(abs(fitted.transform(frame)["y__output"].to_numpy() - expected).max())

    assert driver(fn, frame) < 1e-5


def test_the_class_of_a_sigmoid_is_chosen_above_one_half(driver, frame):
    fit = estimator

    def fn(workers, frame):
        import keras

        frame = frame.assign(y=(frame["y"] > 1).astype("float32"))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
        fitted = fit(workers(1), model=model, feature_cols=["x"], epochs=4).fit(frame)
        columns = {"output_cols": ["p", "guess"], "output_kinds": ["probability", "argmax"]}
        scored = fitted.copy({getattr(fitted, name): value for name, value in columns.items()}).transform(frame)
        above = [float(row[1]) > 0.5 for row in scored["p"]]
        return [above == (scored["guess"] == 1).tolist(), float((scored["guess"] == frame["y"]).mean())]

    is_above, accuracy = driver(fn, frame)
    assert is_above
    assert accuracy > 0.9


def test_mistakes_are_named_before_anything_starts(driver, frame):
    fit, build = estimator, dense

    def fn(workers, frame):
        import keras

        runs, texts = workers(2).runs, []
        for act in (
            lambda: fit(workers(2), 3),
            lambda: fit(workers(2), build(compile=False)),
            lambda: fit(workers(2), label_cols=["y", "w"]),
            lambda: fit(workers(2), feature_cols=["a", "x"]),
            lambda: fit(workers(2), loss=lambda y, p: keras.ops.zeros((3, 4, 5)) + y),
            lambda: fit(workers(2), sample_weight_col="x"),
        ):
            try:
                act().fit(frame)
            except ValueError as error:
                texts.append(str(error))
        return texts, workers(2).runs - runs

    texts, runs = driver(fn, frame)
    model, compiled, outputs, swapped, loss, weight = texts
    assert "Model parameter is required: give a keras.Model" in model
    assert "optimizer is required" in compiled
    assert "loss is required" in compiled
    assert "the model returns 1 output(s) for 2 label column(s)" in outputs
    assert "the model does not take the feature columns" in swapped
    assert "feature 'a': batch of shape (rows)" in swapped
    assert "Exception encountered when calling" in swapped
    assert "\x1b" not in swapped
    assert "the loss or a metric does not take its output and label" in loss
    assert weight.startswith("sample_weight_col='x' holds 4 numbers a row")
    assert runs == 0


@pytest.mark.slow
def test_two_workers_reach_the_accuracy_of_one_process_on_the_digits(driver):
    fit = estimator

    def fn(workers):
        import keras
        import numpy as np
        import pandas as pd
        from sklearn.datasets import load_digits

        def net():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
            )
            model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
            return model

        digits = load_digits()
        data = pd.DataFrame({"x": list((digits.data / 16).astype("float32")), "digit": digits.target})
        train, test = data[:1400], data[1400:]
        columns = {"feature_cols": ["x"], "label_cols": ["digit"]}
        model = fit(workers(2), net(), epochs=20, batch_size=16, **columns).fit(train)
        alone = net()
        alone.fit(np.stack(train["x"]), train["digit"].to_numpy(), batch_size=32, epochs=20, verbose=0)
        truth = test["digit"].to_numpy()
        ours = np.mean(np.stack(model.transform(test)["digit__output"]).argmax(axis=1) == truth)
        theirs = np.mean(alone.predict(np.stack(test["x"]), verbose=0).argmax(axis=1) == truth)
        return float(ours), float(theirs)

    ours, theirs = driver(fn)
    assert ours > 0.9
    assert ours > theirs - 0.02


@pytest.mark.slow
@pytest.mark.timeout(300)  # workers start three times over
def test_a_worker_that_is_killed_during_the_fit_is_replaced_and_the_fit_continues(driver, frame, tmp_path):
    fit, build, apart = estimator, dense, difference

    def fn(workers, frame, folder, env):
        import os
        import signal
        from pathlib import Path

        import keras

        from hvd_cluster.estimators import LocalBackend

        class Dies(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                import hvd_cluster.keras as hvd

                flag = Path(folder, "died")
                if hvd.rank() == 1 and epoch == 2 and not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        def fitted(store, **params):
            fresh = LocalBackend(2, env=env, verbose=0)
            return fit(fresh, build(dropout=0.3), epochs=4, store=f"{folder}/{store}", **params).fit(frame)

        disturbed = fitted("a", callbacks=[Dies()])
        return Path(folder, "died").exists(), apart(disturbed, fitted("b")), len(disturbed.getHistory()["loss"])

    assert driver(fn, frame, str(tmp_path), ENVIRONMENT) == (True, 0, 4)


def test_a_fit_with_validation_gets_no_warning_of_keras(driver, frame):
    fit = estimator

    def fn(workers, frame):
        import warnings

        import keras

        class Strict(keras.callbacks.Callback):
            def set_model(self, model):  # the first call of Keras, before it looks at the data
                super().set_model(model)
                self.before = warnings.filters[:]
                warnings.filterwarnings("error", "Your input ran out of data|`shuffle=True` was passed")

            def on_train_end(self, logs=None):  # the workers serve other tests, too
                warnings.filters[:] = self.before

        given = {"validation": 0.1, "batch_size": 20, "callbacks": [Strict()]}
        return fit(workers(2), **given).fit(frame[:200]).getHistory()["val_loss"]

    assert len(driver(fn, frame)) == 2


@pytest.mark.slow
def test_ranks_without_validation_rows_make_the_same_steps_and_count_nothing(driver, frame):
    fit = estimator

    def fn(workers, frame):
        import keras
        import numpy as np

        class Together(keras.Model):
            """Waits for the other ranks in each validation step."""

            def test_step(self, *data):  # on JAX it takes the state, too
                import torch

                import hvd_cluster.torch as hvd

                if keras.config.backend() == "torch" and hvd.is_initialized():
                    hvd.allreduce(torch.ones(1), name="together")
                return super().test_step(*data)

        found = []
        for rows in (1, 2, 7):
            keras.utils.set_random_seed(0)
            inputs = keras.Input((4,))
            net = Together(inputs, keras.layers.Dense(1)(inputs))
            net.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae", keras.metrics.MeanSquaredError(name="error")])
            marked = frame.assign(v=np.arange(len(frame)) < rows)
            given = {"feature_cols": ["x"], "validation": "v", "val_batch_size": 2, "epochs": 1}
            model = fit(workers(3), net, custom_objects={"Together": Together}, **given).fit(marked)
            held_out = marked[marked["v"]]
            difference = model.transform(held_out)["y__output"].to_numpy("float64") - held_out["y"].to_numpy("float64")
            recorded = {name: values[0] for name, values in model.getHistory().items()}
            squares = float(np.mean(difference**2))
            found.append((squares, recorded["val_loss"]))
            found.append((squares, recorded["val_error"]))
            found.append((float(np.mean(np.abs(difference))), recorded["val_mae"]))
        workers(3).executor.close()
        return found

    for alone, recorded in driver(fn, frame):
        assert recorded == pytest.approx(alone, rel=2e-6)


def test_metrics_that_no_mean_over_ranks_gives_are_those_of_all_rows(driver, frame):
    fit = estimator

    def fn(workers, frame):
        import keras
        import numpy as np

        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
        net.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
        model = fit(workers(2), net, feature_cols=["x"], label_cols=["c"], validation="v", epochs=1).fit(frame)
        rows = frame[frame["v"]]
        x, y = np.stack(rows["x"]), rows["c"].to_numpy("float32")[:, None]
        numbers = model.getModel().evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        recorded = model.getHistory()
        return {name: (numbers[name], recorded[f"val_{name}"][0]) for name in ("loss", "auc", "precision")}

    given = frame.assign(c=(frame["y"] > 0).astype("float32"), v=range(len(frame)))
    for name, (alone, recorded) in driver(fn, given.assign(v=given["v"] < 69)).items():
        assert recorded == pytest.approx(alone, rel=1e-5), name
