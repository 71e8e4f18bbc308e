"""Fits of Spark DataFrames without a store: the rows go through the barrier stage to the workers' own disks."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import SparkBackend, TorchEstimator
from hvd_cluster.estimators.spark.direct_rows import direct_rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 230


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, features, a):
        return self.last(F.dropout(torch.tanh(self.first(torch.cat([features, a], dim=1))), 0.2, self.training))


def estimator(loss=F.mse_loss, **params):
    net = Net()
    given = {
        "feature_cols": ["features", "a"],
        "label_cols": ["y"],
        "input_shapes": [[-1, 3], [-1, 1]],
        "batch_size": 8,
        "epochs": 2,
        "num_proc": 2,
        "random_seed": 5,
        "verbose": 0,
        "validation": 0.2,
        **params,
    }
    return TorchEstimator(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), loss=loss, **given)


@pytest.fixture
def data(spark):
    """A vector column, a number, and a label. No shuffle: its order would differ in each fit."""
    from pyspark.ml.feature import VectorAssembler

    rng = np.random.default_rng(7)
    values = rng.normal(size=(ROWS, 5)).tolist()
    frame = spark.createDataFrame(values, ["x0", "x1", "x2", "a", "noise"])
    frame = frame.selectExpr("*", "x0 - 2 * x1 + 0.5 * x2 + a + 0.1 * noise AS y")
    return VectorAssembler(inputCols=["x0", "x1", "x2"], outputCol="features").transform(frame)


def what_was_learned(model):
    losses = [(record["train"]["loss"], record["validation"]["loss"]) for record in model.getHistory()]
    return {name: value.tolist() for name, value in model.getModel().state_dict().items()}, losses


@pytest.mark.spark("local-cluster", "connect")
@pytest.mark.parametrize("validation", [0.2, "held"])
def test_the_weights_equal_those_of_a_fit_with_a_store(data, tmp_path, validation):
    # Without feature_cols the features are all columns that have no other role: the validation column has one.
    data = data.selectExpr("features", "a", "y", *(["noise > 0.5 AS held"] if validation == "held" else []))
    given = {"validation": validation, "feature_cols": None}
    through_store = estimator(store=tmp_path / "work", **given).fit(data)
    before = set(Path(tempfile.gettempdir()).glob("hvd*"))
    straight = estimator(**given).fit(data)
    assert what_was_learned(straight) == what_was_learned(through_store)
    assert straight.transform(data).count() == ROWS
    assert set(Path(tempfile.gettempdir()).glob("hvd*")) == before


class Reports:
    """A callback that requires reports of the steps, which rank 0 gets."""

    def __call__(self, record, model):
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import current

        assert (current.engine().job_monitor is not None) == (hvd.rank() == 0)


@pytest.mark.spark("local")
def test_the_steps_are_reported_as_with_a_store(data):
    estimator(epochs=1, callbacks=[Reports()]).fit(data)


@pytest.mark.spark("local")
@pytest.mark.parametrize(
    ("columns", "validation", "message"),
    [
        (["a", "held"], "held", "the validation column 'held' cannot be a feature"),
        (["a"], "Held", "no column 'Held'; did you mean 'held'"),
        (["a"], "text", "the validation column 'text' holds string: it must be bool"),
        (["a", "nope"], "held", "no column 'nope'"),
        (["A"], None, "no column 'A'; did you mean 'a'"),
    ],
)
def test_columns_are_checked_as_with_a_store(data, tmp_path, columns, validation, message):
    frame = data.selectExpr("a", "a > 0 AS held", "string(a) AS text")
    given = {"columns": columns, "validation": validation, "num_proc": 2, "partitions_per_process": 2, "seed": 0}
    given |= {"allow_ragged": False, "tensors_only": True, "raw": ()}
    for send in (materialize, direct_rows):
        with pytest.raises(DataError, match=message):
            send(frame, Store.create(tmp_path), **given)


@pytest.mark.spark("local")
def test_nulls_are_reported_as_with_a_store(data):
    holes = data.selectExpr("features", "IF(x0 > 0.5, NULL, a) AS a", "y")
    with pytest.raises((DataError, WorkerFailedError), match="'a'.*null"):
        estimator().fit(holes)


@pytest.mark.spark("local")
def test_a_frame_without_rows_is_rejected_before_workers_start(data):
    with pytest.raises(DataError, match="the data has no rows"):
        estimator().fit(data.where("a > 1000"))


@pytest.mark.spark("local")
def test_a_backend_that_does_not_send_rows_needs_a_store(data):
    class Mine:
        def run(self, fn, args=(), kwargs=None, env=None):
            raise AssertionError

        def num_processes(self):
            return 2

    with pytest.raises(ValueError, match="store is required: Mine does not send the rows"):
        estimator(backend=Mine(), num_proc=None).fit(data)


class Deaf(SparkBackend):
    """As on a remote Connect server: workers reach the driver through the store only."""

    driver_is_out_of_reach = True

    def run(self, fn, args=(), kwargs=None, env=None):
        return super().run(fn, args, kwargs, env)


@pytest.mark.slow
@pytest.mark.spark("connect")
def test_progress_comes_through_the_store_if_workers_cannot_connect(data, tmp_path, capfd):
    def slowly(record, model):
        time.sleep(2.5)

    received = []

    def receive(record):
        received.append((record["epoch"], time.monotonic()))

    given = {"store": tmp_path, "callbacks": [slowly], "driver_callbacks": [receive], "epochs": 4, "verbose": 1}
    model = estimator(backend=Deaf(2, spark=data.sparkSession), num_proc=None, **given).fit(data)
    assert [epoch for epoch, _ in received] == [record["epoch"] for record in model.getHistory()] == [0, 1, 2, 3]
    assert received[-1][1] - received[0][1] > 4  # while the fit ran, not at its end
    assert "epoch 4/4" in capfd.readouterr().err
