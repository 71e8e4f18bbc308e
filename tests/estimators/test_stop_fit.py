"""Exceptions of driver callbacks end a fit: with every framework, on every backend, and through the store."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch

from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.estimators import (
    KerasEstimator,
    LightningEstimator,
    LocalBackend,
    RayBackend,
    SparkBackend,
    StopFit,
    TorchEstimator,
)

if find_spec("lightning") is not None:
    import lightning.pytorch as pl  # here, since it sets variables

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Minimum seconds of an epoch, so that the driver learns of it long before the last one.
EPOCH_S = 0.1
EPOCHS = 600


class TrialPruned(Exception):
    """Like Optuna's."""


class Unheard(LocalBackend):
    """Local workers that cannot open a connection to the driver, like those of a remote Connect server."""

    driver_is_out_of_reach = True

    def run(self, fn, args=(), kwargs=None, env=None):
        return super().run(fn, args, kwargs, env)


@pytest.fixture(params=["torch", "keras", "lightning"])
def long_fit(request, monkeypatch):
    """A function that makes the estimator of a fit that takes minutes unless it is stopped."""
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}")
    if request.param == "keras":
        monkeypatch.setenv("KERAS_BACKEND", "torch")
    make = {"torch": torch_fit, "keras": keras_fit, "lightning": lightning_fit}[request.param]

    def long_fit(callback, **params):
        given = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 16, "epochs": EPOCHS, "verbose": 0}
        return make(driver_callbacks=[callback], **given, **params)

    return long_fit


def torch_fit(**params):
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return TorchEstimator(
        model=net,
        optimizer=optimizer,
        loss=torch.nn.functional.mse_loss,
        callbacks=[lambda record, model: time.sleep(EPOCH_S)],
        **params,
    )


def keras_fit(**params):
    import keras

    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    net.compile(keras.optimizers.SGD(0.01), "mse")
    slow = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(EPOCH_S))
    return KerasEstimator(model=net, callbacks=[slow], **params)


def lightning_fit(**params):
    class Slow(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            time.sleep(EPOCH_S)

    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return LightningEstimator(
        model=net, optimizer=optimizer, loss=torch.nn.functional.mse_loss, callbacks=[Slow()], **params
    )


def data():
    x = np.random.default_rng(1).normal(size=(64, 3)).astype("float32")
    return pd.DataFrame({"x": list(x), "y": (x @ [1.0, 2.0, -1.0]).astype("float32")})


def stop(record):
    if record["epoch"] == 1:
        raise StopFit


def num_epochs(model):
    history = model.getHistory()
    return len(history["loss"] if isinstance(history, dict) else history)


def require_stops(long_fit, rows, **params):
    """Check that ``StopFit`` returns the model so far, and that ``fit`` raises any other exception unchanged."""
    model = long_fit(stop, **params).fit(rows)
    assert 2 <= num_epochs(model) < EPOCHS
    raised = []

    def prune(record):
        raised.append(TrialPruned(record["epoch"]))
        raise raised[-1]

    with pytest.raises(TrialPruned) as caught:
        long_fit(prune, **params).fit(rows)
    assert raised == [caught.value]
    with scratch_folder("sweep"):  # removes folders of killed workers, as the next fit would
        pass


def test_an_exception_of_a_driver_callback_ends_a_fit_in_local_processes(long_fit):
    require_stops(long_fit, data(), backend=LocalBackend(2, verbose=0))


def test_a_fit_that_is_stopped_between_checkpoints_returns_the_last_one_without_training_again(long_fit):
    def stop(record):
        if record["epoch"] == 4:
            raise StopFit

    model = long_fit(stop, backend=LocalBackend(1, verbose=0), checkpoint_every_epochs=3).fit(data())
    assert num_epochs(model) > 0
    assert num_epochs(model) % 3 == 0  # three, unless the workers have saved more before they ended


def test_an_exception_of_a_driver_callback_ends_a_fit_that_reports_through_the_store(long_fit, tmp_path):
    require_stops(long_fit, data(), backend=Unheard(2, verbose=0), store=tmp_path)
    assert [path.name for path in tmp_path.rglob("stop")] == []


def test_an_exception_that_comes_when_the_workers_have_ended_is_raised(tmp_path):
    def late(record):
        if record["epoch"] == 0:  # the workers report it through the store, and go on
            time.sleep(20)
            raise TrialPruned

    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    short = torch_fit(
        driver_callbacks=[late], backend=Unheard(1, verbose=0), store=tmp_path, epochs=30, verbose=0, **columns
    )
    with pytest.raises(TrialPruned):
        short.fit(data())


@pytest.mark.spark("local", "connect")
@pytest.mark.parametrize("where", ["store", "no store"])
def test_an_exception_of_a_driver_callback_ends_a_fit_on_spark(spark, long_fit, where, tmp_path):
    frame = data()
    rows = spark.createDataFrame(frame.assign(x=frame["x"].map(lambda row: row.tolist())))
    store = {"store": str(tmp_path)} if where == "store" else {}
    require_stops(long_fit, rows, backend=SparkBackend(2, verbose=0, spark=spark), **store)


def test_an_exception_of_a_driver_callback_ends_a_fit_on_ray(ray_cluster, long_fit, tmp_path):
    require_stops(long_fit, data(), backend=RayBackend(2, verbose=0), store=str(tmp_path))
