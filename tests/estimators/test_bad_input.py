"""Each mistake gives a message with cause and remedy before any worker starts."""

from __future__ import annotations

import sys
import threading

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import DataError, LaunchError
from hvd_cluster.estimators import Backend, TorchEstimator

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Unreached(Backend):
    def run(self, fn, args=(), kwargs=None, env=None):
        raise AssertionError("a worker was started")

    def num_processes(self):
        return 2


def estimator(**params):
    net = params.pop("model", None) or torch.nn.Linear(4, 1)
    given = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "backend": Unreached(),
        "verbose": 0,
        **params,
    }
    return TorchEstimator(**given)


@pytest.mark.parametrize(
    ("params", "error", "texts"),
    [
        ({"feature_cols": ["X"]}, ValueError, ["no column 'X'; did you mean 'x'?", "the columns are: 'x', 'a', 'y'"]),
        ({"label_cols": ["z"]}, ValueError, ["no column 'z'"]),
        ({"sample_weight_col": "weight"}, ValueError, ["no column 'weight'"]),
        ({"validation": "val"}, ValueError, ["no column 'val'"]),
        ({"label_cols": None}, ValueError, ["label_cols is required"]),
        ({"optimizer": None}, ValueError, ["optimizer is required"]),
        ({"optimizer": 3}, ValueError, ["optimizer=3 is not an optimizer: give a torch.optim.Optimizer"]),
        ({"metrics": F.mse_loss}, ValueError, ["metrics=", "must be a list or a dict: give {'name': function}"]),
        ({"loss": None}, ValueError, ["loss is required"]),
        (
            {"loss": torch.nn.MSELoss, "metrics": [[torch.nn.L1Loss]]},
            ValueError,
            ["loss has the class MSELoss: give an instance of it, MSELoss()", "metrics has the class L1Loss"],
        ),
        ({"loss_constructors": [torch.nn.MSELoss]}, ValueError, ["only one of loss_constructors and loss parameters"]),
        ({"num_proc": 2}, ValueError, ['At most one of parameters "backend" and "num_proc" may be specified']),
        ({"loss_weights": [0.5, 0.5]}, ValueError, ["loss_weights has 2 entries for 1 label columns"]),
        ({"metrics": [[F.mse_loss, F.l1_loss]]}, ValueError, ["metrics[0] has 2 entries for 1 label columns"]),
        ({"input_shapes": [[-1, 4], [-1, 1]]}, ValueError, ["input_shapes has 2 entries for 1 feature columns"]),
        ({"loss": lambda output, label: (output - label) ** 2}, DataError, ["must return a scalar", ".mean()"]),
        (
            {"model": torch.nn.Linear(3, 1)},
            DataError,
            ["the model does not take", "feature 'x': batch of shape (rows, 4)"],
        ),
        ({"feature_cols": ["x", "a"]}, DataError, ["the model does not take", "feature 'a'"]),
        ({"label_cols": ["y", "a"]}, DataError, ["1 output(s) for 2 label column(s)"]),
    ],
)
def test_a_mistake_is_reported_before_any_worker_starts(frame, params, error, texts):
    with pytest.raises(error) as caught:
        estimator(**params).fit(frame)
    for text in texts:
        assert text in str(caught.value)


def test_all_mistakes_come_in_one_message(frame):
    with pytest.raises(ValueError, match="loss_weights has 2 entries") as caught:
        estimator(loss_weights=[1, 2], feature_cols=["q"], optimizer=None).fit(frame)
    assert "optimizer is required" in str(caught.value)
    assert "no column 'q'" in str(caught.value)


def test_a_missing_model_is_reported(frame):
    with pytest.raises(ValueError, match="Model parameter is required"):
        TorchEstimator(label_cols=["y"], backend=Unreached()).fit(frame)


def test_an_optimizer_that_needs_a_closure_is_rejected(frame):
    net = torch.nn.Linear(4, 1)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        estimator(model=net, optimizer=torch.optim.LBFGS(net.parameters())).fit(frame)


def test_an_uninitialized_lazy_model_is_rejected_with_the_remedy(frame):
    net = torch.nn.Sequential(torch.nn.LazyLinear(1))
    with pytest.raises(ValueError, match=r"model: 0\.weight, 0\.bias have no shape yet.*call the model once"):
        estimator(model=net).fit(frame)


def test_an_unpicklable_captured_variable_is_named(frame):
    lock = threading.Lock()

    def loss(output, label):
        with lock:
            return F.mse_loss(output, label)

    with pytest.raises(LaunchError, match=r"TorchEstimator\.fit cannot be sent to the workers") as caught:
        estimator(loss=loss).fit(frame)
    assert "argument 'loss', captured variable 'lock': _thread.lock" in str(caught.value)


def test_an_unwritable_store_is_named_with_the_remedy(frame, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the store '.*file/store' cannot be written.*choose a path"):
        estimator(store=tmp_path / "file" / "store").fit(frame)


def test_an_empty_frame_is_rejected(frame):
    with pytest.raises(DataError, match=r"empty|no rows"):
        estimator().fit(frame[:0])


def test_a_null_in_a_feature_names_the_column_and_the_count(frame):
    holes = frame.assign(a=frame["a"].where(frame["a"] > 0))
    count = int(holes["a"].isna().sum())
    with pytest.raises(DataError, match=rf"'a'.*{count}"):
        estimator(feature_cols=["a"], model=torch.nn.Linear(1, 1)).fit(holes)


@pytest.mark.parametrize("lost", ["x", "y", "a"])
def test_a_needed_column_that_transformation_fn_removes_is_named(frame, lost):
    def leave_out(row):
        return {name: value for name, value in row.items() if name != lost}

    with pytest.raises(DataError, match=f"transformation_fn lack columns: there is no column '{lost}'"):
        estimator(transformation_fn=leave_out, sample_weight_col="a").fit(frame)


def test_a_failed_fit_leaves_nothing_behind(frame, tmp_path):
    with pytest.raises(DataError):
        estimator(model=torch.nn.Linear(3, 1), store=tmp_path).fit(frame)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_data_of_an_unknown_kind_is_rejected():
    with pytest.raises(DataError, match=r"builtins\.dict is not supported: give a Spark DataFrame"):
        estimator().fit({"x": [1]})


def test_data_without_a_column_for_the_model_is_rejected():
    with pytest.raises(ValueError, match="no column is left for the model's input"):
        estimator(feature_cols=None).fit(pd.DataFrame({"y": [1.0, 2.0]}))


def mismatched(store, backend, width=1):
    """An estimator whose loss does not take labels like 0.5."""
    net = torch.nn.Linear(width, 3)
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=F.cross_entropy,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, width]],
        store=store,
        backend=backend,
        verbose=0,
    )


@pytest.fixture
def nothing_may_be_written(monkeypatch):
    monkeypatch.setattr("hvd_cluster.estimators.fit_data.materialize", lambda *given, **more: pytest.fail("written"))


@pytest.mark.parametrize("shape", [(2_000_000, 1), (200, 60_000)], ids=["many rows", "wide rows"])
def test_the_model_is_tried_before_rows_of_memory_are_written(one_worker, tmp_path, nothing_may_be_written, shape):
    rows, width = shape
    values = np.zeros(rows * width, "float32")
    x = values if width == 1 else pa.FixedSizeListArray.from_arrays(values, width)
    table = pa.table({"x": x, "y": np.full(rows, 0.5)})
    for data in (table, table.to_pandas()):
        with pytest.raises(DataError, match="the loss does not take output and label of 'y'"):
            mismatched(tmp_path, one_worker, width).fit(data)


def test_the_model_is_tried_before_parquet_is_copied(one_worker, tmp_path, nothing_may_be_written):
    table = pa.table({"x": np.zeros(50, "float32"), "y": np.full(50, 0.5), "held": np.arange(50) % 2})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="the loss does not take output and label of 'y'"):
        mismatched(tmp_path / "store", one_worker).setValidation("held").fit(tmp_path / "a.parquet")
