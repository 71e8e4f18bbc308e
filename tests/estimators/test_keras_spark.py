"""KerasEstimator on Spark: rows from a DataFrame, workers in barrier tasks, scores back in a DataFrame."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import survivors

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(survivors)

pytestmark = [pytest.mark.spark("local", "connect"), pytest.mark.timeout(300)]


def rows():
    x = np.random.default_rng(1).normal(size=(96, 3)).astype("float32")
    y = x @ [1.0, 2.0, -1.0]
    return pd.DataFrame({"id": np.arange(96), "x": x.tolist(), "y": y, "c": np.digitize(y, [-1.0, 1.0])})


@pytest.fixture(scope="module")
def keras():
    """Keras on torch, unless it is imported already on another backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        import keras

    return keras


def test_a_spark_frame_is_fitted_scored_and_the_stages_are_saved(spark, keras, tmp_path):
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.linalg import DenseVector

    from hvd_cluster.estimators import KerasEstimator

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    outputs = [keras.layers.Dense(1)(Twice()(x)), keras.layers.Dense(3, "softmax")(x)]
    net = keras.Model(x, outputs)
    net.compile(keras.optimizers.Adam(0.05), ["mse", "sparse_categorical_crossentropy"])
    data = spark.createDataFrame(rows()).repartition(3)
    fit = KerasEstimator(
        model=net,
        custom_objects={"Twice": Twice},
        feature_cols=["x"],
        label_cols=["y", "c"],
        validation=0.2,
        batch_size=8,
        epochs=3,
        num_proc=2,
        verbose=0,
        store=str(tmp_path / "work"),
    )
    fitted = Pipeline(stages=[fit]).fit(data)
    model = fitted.stages[0]
    assert model.getHistory()["loss"][-1] < model.getHistory()["loss"][0]
    assert len(model.getHistory()["val_loss"]) == 3
    fitted.save(str(tmp_path / "model"))
    scored = PipelineModel.load(str(tmp_path / "model")).transform(data).orderBy("id").collect()
    one, three = model.getModel().predict(np.stack(rows()["x"].to_list()), verbose=0)
    assert np.allclose([row["y__output"] for row in scored], one.ravel(), atol=1e-5)
    assert isinstance(scored[0]["c__output"], DenseVector)
    assert np.allclose([row["c__output"].toArray() for row in scored], three, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark("local-cluster", "local", "connect")
@pytest.mark.parametrize("victim", ["worker", "task", "executor"])
def test_a_death_in_mid_epoch_changes_nothing(spark, spark_master, keras, tmp_path, victim, caplog):
    from hvd_cluster.estimators import KerasEstimator

    if victim == "executor" and spark_master != "local-cluster":
        pytest.skip("the executor is the driver's own JVM")
    mark = tmp_path / "killed"

    class Dies(keras.callbacks.Callback):
        """Kills a process in the second epoch, once."""

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            import hvd_cluster.keras as hvd

            if (hvd.rank(), self.epoch, batch) == (1, 1, 2) and not mark.exists():
                mark.touch()
                survivors.kill(victim)

    data = spark.createDataFrame(rows())  # without a shuffle, which would reorder the rows in each fit

    def fitted(*callbacks):
        keras.utils.set_random_seed(1)
        x = keras.Input((3,))
        net = keras.Model(x, keras.layers.Dense(1)(keras.layers.Dropout(0.3)(x)))
        net.compile(keras.optimizers.Adam(0.05), "mse")
        stop = keras.callbacks.EarlyStopping(patience=2, min_delta=1e9, restore_best_weights=True)
        given = {"validation": 0.2, "batch_size": 8, "epochs": 6, "random_seed": 5, "verbose": 0}
        # Without a store, a killed task leaves the rows that it received on its disk.
        given |= {"num_proc": 2, "store": str(tmp_path / f"work-{len(callbacks)}")}
        return KerasEstimator(
            model=net, feature_cols=["x"], label_cols=["y"], callbacks=[stop, *callbacks], **given
        ).fit(data)

    undisturbed, disturbed = fitted(), fitted(Dies())
    assert mark.exists()
    assert [text for text in caplog.messages if "(1 of at most 3 times)" in text]
    assert disturbed.getHistory() == undisturbed.getHistory()
    assert len(disturbed.getHistory()["loss"]) == 3
    pairs = zip(disturbed.getModel().get_weights(), undisturbed.getModel().get_weights(), strict=True)
    assert all((one == other).all() for one, other in pairs)
