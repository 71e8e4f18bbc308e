from __future__ import annotations

import datetime as dt
import math
import sys
import threading
from decimal import Decimal
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from hvd_cluster.data.schema import ColumnKind, infer
from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchModel
from hvd_cluster.estimators.scoring.output_columns import VECTOR, metadata_of, output_type
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.torch import framework
from hvd_cluster.estimators.torch.framework import evaluating

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Sums(torch.nn.Module):
    """The sum of each row of x, and x itself twice."""

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.sum(dim=1, keepdim=True)), torch.cat([x, x], dim=1)


def model(kind=TorchModel, types=("float64", VECTOR), **params):
    given = {
        "model": Sums(),
        "feature_columns": ["x"],
        "label_columns": ["y", "z"],
        "_metadata": {"feature_dtypes": ("float32",), "output_types": types},
        **params,
    }
    return kind(**given)


def test_a_model_is_in_evaluation_mode_until_the_last_thread_has_scored():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5).eval())
    begun, ended, seen = threading.Event(), threading.Event(), []

    def score():
        with evaluating(net):
            begun.set()
            assert ended.wait(60)
            seen.append([module.training for module in net.modules()])

    thread = threading.Thread(target=score)
    with evaluating(torch.nn.Sequential(net)), evaluating(net[0]):
        thread.start()
        assert begun.wait(60)
    with evaluating(net):
        pass
    ended.set()
    thread.join()
    assert seen == [[False] * 3]
    assert [module.training for module in net.modules()] == [True, True, False]
    with pytest.raises(ZeroDivisionError), evaluating(net):
        raise ZeroDivisionError
    assert net.training


def test_a_failure_of_eval_leaves_nothing_behind():
    class Fails(torch.nn.Dropout):
        def train(self, mode=True):
            if not mode:
                raise ZeroDivisionError
            return super().train(mode)

    net = torch.nn.Sequential(torch.nn.Dropout(), Fails())
    with pytest.raises(ZeroDivisionError), evaluating(net):
        pass
    assert not framework._evaluated
    assert [module.training for module in net.modules()] == [True] * 3


TABLE = pa.table({"id": [1, 2, 3], "x": [[1.0, 0.4], [2.0, 0.6], [-1.0, -0.6]]})


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "expected"),
    [
        (ColumnKind.NUMERIC, "int64", (1,), "int64"),
        (ColumnKind.NUMERIC, "float32", (), "float32"),
        (ColumnKind.BOOL, "bool", (1,), "bool"),
        (ColumnKind.NUMERIC, "float16", (1,), "float64"),
        (ColumnKind.STRING, "str", (1,), "float64"),
        (ColumnKind.NUMERIC, "int64", (3,), VECTOR),
        (ColumnKind.NUMERIC, "int64", (-1, -1), "int64"),  # not known
        (ColumnKind.VECTOR, "float64", (1,), VECTOR),
        (ColumnKind.LIST, "float32", (4,), VECTOR),
    ],
)
def test_one_number_has_the_type_of_its_label_and_anything_else_is_a_vector(kind, dtype, shape, expected):
    assert output_type(kind, dtype, shape) == expected


def test_a_table_keeps_its_columns_and_gets_the_outputs():
    scored = model().transform(TABLE)
    assert scored.column_names == ["id", "x", "y__output", "z__output"]
    assert scored["y__output"].type == pa.float64()
    assert scored["y__output"].to_pylist() == pytest.approx([1.4, 2.6, -1.6])
    assert scored["z__output"].type == pa.list_(pa.float32())
    assert scored["z__output"][1].as_py() == pytest.approx([2.0, 0.6, 2.0, 0.6])


@pytest.mark.parametrize(("name", "expected"), [("int32", [1, 3, -2]), ("bool", [True, True, False])])
def test_integers_and_bools_are_rounded(name, expected):
    scored = model(types=(name, VECTOR)).transform(TABLE)
    assert scored["y__output"].to_pylist() == expected
    assert str(scored["y__output"].type) == name


def test_an_output_beyond_the_type_of_its_label_is_named_with_the_remedy():
    narrow = model(types=("uint8", VECTOR))
    with pytest.raises(DataError, match=r"output column 'y__output': values do not fit the type uint8.*setOutputKinds"):
        narrow.transform(TABLE)
    scored = narrow.setOutputKinds(["array", "plain"]).transform(TABLE)
    assert scored["y__output"][2].as_py() == pytest.approx([-1.6])


def test_a_pandas_frame_keeps_its_index():
    frame = TABLE.to_pandas().set_index(pd.Index(["a", "b", "c"]))
    scored = model().transform(frame)
    assert list(scored.index) == ["a", "b", "c"]
    assert scored["y__output"].dtype == np.float64
    assert scored.loc["b", "z__output"] == pytest.approx([2.0, 0.6, 2.0, 0.6])
    assert "y__output" not in frame


def test_rows_are_scored_in_batches_and_the_model_evaluates():
    class Spy(Sums):
        def forward(self, x):
            assert not self.training
            assert len(x) <= 2
            return super().forward(x)

    spy = Spy().train()
    scored = model(model=spy, batch_size=2).transform(TABLE)
    assert scored["y__output"].to_pylist() == pytest.approx([1.4, 2.6, -1.6])
    assert spy.training


def test_no_rows_give_no_rows():
    scored = model().transform(TABLE[:0])
    assert scored.num_rows == 0
    assert scored["z__output"].type == pa.list_(pa.float32())


def test_outputs_may_be_named():
    scored = model().setOutputCols(["sum", "twice"]).transform(TABLE)
    assert scored.column_names == ["id", "x", "sum", "twice"]
    assert model().getOutputCols() == ["y__output", "z__output"]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"output_cols": ["id", "twice"]}, "output column 'id' exists already"),
        ({"output_cols": ["sum"]}, "output_cols has 1 names for 2 outputs"),
        ({"feature_columns": ["X"]}, "no column 'X'; did you mean 'x'"),
        ({"model": None}, "has no model"),
    ],
)
def test_what_cannot_be_scored_is_named(params, text):
    with pytest.raises(ValueError, match=text):
        model(**params).transform(TABLE)


def test_nulls_and_wrong_shapes_are_named():
    with pytest.raises(DataError, match=r"'x'.*1"):
        model().transform(pa.table({"x": [[1.0, 2.0], None]}))
    net = torch.nn.Linear(3, 1)
    with pytest.raises(DataError, match=r"(?s)failed on the feature columns.*feature 'x': batch of shape \(rows, 2\)"):
        model(model=net).transform(TABLE)
    with pytest.raises(DataError, match=r"(?s)failed on the feature columns.*given to the model as \(-1, 4\)"):
        model(model=net, input_shapes=[[-1, 4]]).transform(TABLE)
    with pytest.raises(DataError, match="one row for each"):
        model(model=torch.nn.Flatten(0), label_columns=["y"], _metadata=None).transform(TABLE)


def test_a_prediction_function_of_the_users_own_goes_row_by_row():
    class Mine(TorchModel):
        def get_prediction_fn(self):
            def predict_fn(net, row):
                x = torch.as_tensor(np.asarray(row["x"], dtype=np.float32)).unsqueeze(0)
                return [net(x)[0] + row["id"], net(x)[1]]

            return predict_fn

    for data in (TABLE, TABLE.to_pandas()):
        scored = model(Mine).transform(data)
        assert list(scored["y__output"].to_numpy()) == pytest.approx([2.4, 4.6, 1.4])
        assert len(scored["z__output"][0]) == 4


def test_the_default_prediction_function_predicts_one_row():
    one, two = model().get_prediction_fn()(Sums().eval(), {"x": [1.0, 2.0]})
    assert one.item() == 3.0
    assert two.tolist() == [[1.0, 2.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (dt.date(1970, 1, 5), [4.0]),
        (dt.datetime.fromisoformat("1970-01-05"), [4.0]),
        (dt.timedelta(seconds=4), [4.0]),
        (np.float32(0.5), [0.5]),
        (True, [1.0]),
        (Decimal("1.5"), [1.5]),
        (np.arange(4.0).reshape(2, 2), [[0.0, 1.0], [2.0, 3.0]]),
        (torch.arange(4.0).reshape(2, 2), [[0.0, 1.0], [2.0, 3.0]]),
        ([1, 2], [1.0, 2.0]),
        ([], []),
        (math.nan, [math.nan]),
        ([1.0, math.nan], [1.0, math.nan]),
        ([torch.tensor(1.0), torch.tensor(2.0)], [1.0, 2.0]),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
    ],
)
def test_the_default_prediction_function_takes_what_a_column_may_hold(value, seen):
    unit = {dt.date: "D", dt.datetime: "D", dt.timedelta: "s"}.get(type(value), "")
    metadata = {"feature_dtypes": ("float32",), "output_types": (VECTOR,), "feature_units": (unit,)}
    fitted = model(model=torch.nn.Identity(), label_columns=["y"], _metadata=metadata)
    found = fitted.get_prediction_fn()(torch.nn.Identity(), {"x": value, "other": "a"})
    np.testing.assert_array_equal(found.flatten(), np.array(seen, dtype="float32").flatten())


def test_the_default_prediction_function_keeps_the_digits_of_numbers():
    fitted = model(model=torch.nn.Identity(), label_columns=["y"], _metadata={"feature_dtypes": ("float64",)})
    for value in (0.1, [0.1], np.float64(0.1)):
        assert fitted.get_prediction_fn()(torch.nn.Identity(), {"x": value}).item() == 0.1


def test_the_default_prediction_function_mixes_numbers_with_other_values():
    class Filled(torch.nn.Module):
        def forward(self, x, day):
            return torch.nan_to_num(x, -1.0) + day

    metadata = {"feature_dtypes": ("float32",) * 2, "output_types": (VECTOR,), "feature_units": ("", "D")}
    fitted = model(model=Filled(), feature_columns=["x", "day"], label_columns=["y"], _metadata=metadata)
    score = fitted.get_prediction_fn()
    assert score(fitted.getModel(), {"x": math.nan, "day": dt.date(1970, 1, 5)}).tolist() == [3.0]
    for missing in (None, pd.NaT, pd.NA):
        with pytest.raises(DataError, match="column 'day' holds nothing but nulls"):
            score(fitted.getModel(), {"x": 1.0, "day": missing})


def test_a_preprocess_gets_the_nan_of_a_row():
    fitted = model(
        model=torch.nn.Identity(),
        label_columns=["y"],
        preprocess=lambda batch: np.nan_to_num(batch["x"], nan=-1.0),
        batch_format="numpy",
        _metadata=None,
    )
    assert fitted.get_prediction_fn()(torch.nn.Identity(), {"x": math.nan}).tolist() == [-1.0]


def test_a_transformation_may_return_ints_first_and_floats_later():
    def clipped(row):
        return {"a": max(0, row["a"])}

    given = {"feature_columns": ["a"], "label_columns": ["y"], "input_shapes": [[-1, 1]]}
    given["_metadata"] = {"feature_dtypes": ("float32",), "output_types": ("float32",)}
    fitted = model(model=torch.nn.Identity(), transformation_fn=clipped, **given)
    table = pa.table({"a": [1.5, -1.0, 2.5]})
    for start in range(3):
        scored = fitted.transform(table.slice(start))["y__output"].to_pylist()
        assert scored == [1.5, 0.0, 2.5][start:]


def test_the_default_prediction_function_transforms_the_row_as_transform_does():
    def scaled(row):
        return {**row, "x": np.asarray(row["x"]) * 10}

    fitted = model(transformation_fn=scaled)
    row = {"x": [1.0, 2.0]}
    one, _ = fitted.get_prediction_fn()(Sums().eval(), row)
    assert one.item() == 30.0 == fitted.transform(pa.table({"x": [row["x"]]}))["y__output"][0].as_py()


def test_the_history_is_a_frame_and_a_list():
    records = [{"epoch": 0, "train": {"loss": 0.5, "all_metrics": []}}]
    fitted = model(history=records)
    assert fitted.getHistory() == records
    assert fitted.history["train_loss"].tolist() == [0.5]


def test_a_model_on_a_copy_with_other_values():
    fitted = model()
    other = fitted.copy({fitted.output_cols: ["a", "b"]})
    assert (other.getOutputCols(), fitted.getOutputCols()) == (["a", "b"], ["y__output", "z__output"])
    assert other.getModel() is fitted.getModel()


class First(torch.nn.Module):
    """The first feature as it is."""

    def forward(self, x):
        return x.reshape(-1, 1)


NOON = pd.Timestamp("2024-05-06T12:00:00")


@pytest.mark.parametrize(("unit", "count"), [("us", NOON.value // 1000), ("s", NOON.value // 10**9), ("D", 19_849)])
@pytest.mark.parametrize("given", ["ns", "ms"])
def test_times_are_counted_in_the_unit_that_the_model_was_trained_on(unit, count, given):
    table = pa.table({"x": pd.Series([NOON]).astype(f"datetime64[{given}]")})
    metadata = {"feature_dtypes": ("int64",), "feature_units": (unit,), "output_types": ("int64",)}
    trained = model(model=First(), label_columns=["y"], _metadata=metadata)
    assert trained.transform(table)["y__output"].to_pylist() == [count]


def test_times_of_a_model_that_was_saved_without_units_are_counted_as_they_come():
    metadata = {"feature_dtypes": ("int64",), "output_types": ("int64",)}
    trained = model(model=First(), label_columns=["y"], _metadata=metadata)
    times = pa.array([NOON], pa.timestamp("ns"))
    assert trained.transform(pa.table({"x": times}))["y__output"].to_pylist() == [NOON.value]


@pytest.mark.parametrize(("unit", "count"), [("us", 19_849 * 86_400 * 10**6), ("s", 19_849 * 86_400), ("D", 19_849)])
def test_days_are_counted_in_the_unit_that_the_model_was_trained_on(unit, count):
    metadata = {"feature_dtypes": ("int64",), "feature_units": (unit,), "output_types": ("int64",)}
    trained = model(model=First(), label_columns=["y"], _metadata=metadata)
    days = pa.table({"x": pa.array([19_849], pa.date32())})
    assert trained.transform(days)["y__output"].to_pylist() == [count]


def test_a_model_knows_the_units_of_what_it_was_trained_on():
    table = pa.table({"when": pa.array([NOON], pa.timestamp("us")), "day": pa.array([1], pa.date32()), "y": [1.0]})
    inputs = Inputs(feature_cols=("y", "day", "when"), label_cols=("y",), feature_dtypes=("float32",) * 3)
    schema = SimpleNamespace(schema=infer(table.schema))
    outputs = {"output_shapes": ((1,),), "output_names": ("0",)}
    spec = SimpleNamespace(inputs=inputs, dataset=schema, transformation_fn=None, **outputs)
    assert metadata_of(spec)["feature_units"] == ("", "D", "us")
