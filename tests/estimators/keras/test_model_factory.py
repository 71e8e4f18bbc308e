"""Keras fits of models that each worker makes."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def adapted(width, random_base=False):
    """A frozen layer of 20 bytes for each of ``width``, with a running mean behind it."""
    import os

    import keras

    x = keras.Input((4,), name="x")
    base = keras.layers.Dense(width, "tanh", trainable=False)
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Reshape((-1, 4))(base(x)))
    model = keras.Model(x, keras.layers.Dense(1)(keras.layers.BatchNormalization()(pooled)))
    if random_base:
        base.bias.assign([int.from_bytes(os.urandom(2), "big")] * width)
    model.compile(keras.optimizers.Adam(0.02), "mse")
    return model


def unbuilt():
    import keras

    return keras.Sequential([keras.layers.Dense(1)])


def estimator(backend, model, **params):
    from hvd_cluster.estimators import KerasEstimator

    given = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "random_seed": 5,
        "verbose": 0,
        "run_id": "r",
        **params,
    }
    return KerasEstimator(model=model, backend=backend, **given)


def test_a_frozen_base_is_neither_stored_nor_saved(driver, frame, tmp_path):
    make, fit = adapted, estimator

    def fn(workers, frame, folder):
        import numpy as np

        from hvd_cluster.estimators import KerasModel, ModelFactory

        factory = ModelFactory(make, 100_000)
        whole = fit(workers(2), factory, epochs=3, store=f"{folder}/a").fit(frame)
        assert (folder / "a" / "runs" / "r" / "checkpoint").stat().st_size < 100_000
        fit(workers(2), factory, epochs=1, store=f"{folder}/b").fit(frame)
        resumed = fit(workers(2), factory, epochs=3, store=f"{folder}/b").fit(frame)
        pairs = zip(whole.getModel().get_weights(), resumed.getModel().get_weights(), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)
        losses = whole.getHistory()["loss"]
        assert losses[-1] < losses[0]
        whole.write().overwrite().save(f"{folder}/model")
        assert sum(path.stat().st_size for path in (folder / "model").rglob("*") if path.is_file()) < 100_000
        assert KerasModel.load(f"{folder}/model").transform(frame).equals(whole.transform(frame))
        assert len(whole._pickled_model()) < 100_000

    driver(fn, frame, tmp_path)


def sent_bytes(timeline):
    """The bytes of all broadcasts of a fit, on all ranks together."""
    import json
    import math

    import numpy as np

    events = json.loads(timeline.read_text())
    args = [event["args"] for event in events if event.get("name") == "BROADCAST" and "args" in event]
    return sum(np.dtype(each["dtype"]).itemsize * math.prod(json.loads(each["shape"])) for each in args)


@pytest.mark.parametrize("is_changed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_frozen_base_does_not_travel_unless_rank_0_has_changed_it(driver, frame, tmp_path, is_changed):
    make, fit, count = adapted, estimator, sent_bytes

    def fn(workers, frame, folder):
        import os

        import keras
        import numpy as np

        from hvd_cluster.estimators import LocalBackend, ModelFactory

        class LoadOnRank0(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                if int(os.environ["HOROVOD_RANK"]) == 0:
                    self.model.layers[1].bias.assign(np.arange(100_000) / 100_000)

            def on_train_batch_begin(self, batch, logs=None):
                assert float(np.asarray(self.model.layers[1].bias)[1]) == np.float32(1e-5)

        backend = LocalBackend(2, env={"HOROVOD_TIMELINE": f"{folder}/timeline.json"}, verbose=0)
        callbacks = [LoadOnRank0()] if is_changed else []
        fit(backend, ModelFactory(make, 100_000), epochs=2, callbacks=callbacks).fit(frame)
        return count(folder / "timeline.json")

    sent = driver(fn, frame, tmp_path)
    # The base has a kernel of 1.6 MB, and a bias of 0.4 MB that is sent before and after the first batch.
    least, most = (1_600_000, 1_700_000) if is_changed else (1, 100_000)
    assert least < sent < most


def test_a_factory_that_does_not_fit_is_refused(driver, frame, tmp_path):
    make, fit, without_weights = adapted, estimator, unbuilt

    def fn(workers, frame, folder):
        import pytest

        from hvd_cluster.errors import DataError, WorkerFailedError
        from hvd_cluster.estimators import ModelFactory

        with pytest.raises(DataError, match=r"ModelFactory\(dict\) must return a keras.Model, and returned"):
            fit(workers(1), ModelFactory(dict)).fit(frame)
        with pytest.raises(DataError, match="unbuilt must return a model that has weights: begin it with keras.Input"):
            fit(workers(1), without_weights).fit(frame)
        with pytest.raises(WorkerFailedError, match=r"does not always make the same model: 'weight 1 \(bias\)'"):
            fit(workers(2), ModelFactory(make, 8, random_base=True)).fit(frame)
        fit(workers(1), ModelFactory(make, 8), store=str(folder)).fit(frame)
        with pytest.raises(DataError, match=r"another model than the factory makes now: 'weight 0 \(kernel\)'"):
            fit(workers(1), ModelFactory(make, 8), store=str(folder), epochs=2, random_seed=6).fit(frame)

    driver(fn, frame, tmp_path)
