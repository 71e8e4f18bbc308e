from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.schema import ColumnKind
from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchModel
from hvd_cluster.estimators.scoring.output_columns import ARRAY, VECTOR, output_type, plan
from hvd_cluster.estimators.torch.output_scales import output_scales

LOGITS = [[0.0, 1.0, 3.0], [2.0, 1.0, 0.0]]
TABLE = pa.table({"x": LOGITS})


def model(outputs=3, **params):
    given = {
        "model": torch.nn.Identity(),
        "feature_columns": ["x"],
        "label_columns": ["c"],
        "_metadata": {"feature_dtypes": ("float32",), "output_types": (VECTOR,), "output_shapes": ((outputs,),)},
        **params,
    }
    return TorchModel(**given)


def softmax(rows):
    powers = np.exp(np.array(rows))
    return powers / powers.sum(axis=1, keepdims=True)


def test_one_output_in_several_forms():
    scored = model(output_cols=["p", "guess", "raw"], output_kinds=["probability", "argmax", "array"]).transform(TABLE)
    assert scored.schema.field("guess").type == pa.int64()
    assert scored["guess"].to_pylist() == [2, 0]
    assert np.array(scored["p"].to_pylist()) == pytest.approx(softmax(LOGITS), abs=1e-6)
    assert scored["raw"].to_pylist() == LOGITS


def test_a_column_for_each_element():
    scored = model(output_kinds="columns").transform(TABLE)
    assert scored.column_names == ["x", "c__output_0", "c__output_1", "c__output_2"]
    assert [scored[f"c__output_{i}"].to_pylist() for i in range(3)] == [[0.0, 2.0], [1.0, 1.0], [3.0, 0.0]]


def test_a_single_logit_belongs_to_the_second_of_two_classes():
    table = pa.table({"x": [[2.0], [-1.0]]})
    given = {"outputs": 1, "output_cols": ["p", "guess"], "output_kinds": ["probability", "argmax"]}
    scored = model(**given).transform(table)
    assert scored["guess"].to_pylist() == [1, 0]
    assert np.array(scored["p"].to_pylist())[:, 1] == pytest.approx(1 / (1 + np.exp([-2.0, 1.0])), abs=1e-6)


def test_probabilities_are_kept_and_chosen_above_one_half():
    def column(kind, scale, type_="float64"):
        return plan(["p"], 1, [type_], [(1,)], [kind], on_spark=False, scales=[scale])[0]

    output = torch.tensor([[0.1], [0.4], [0.7]])
    assert column("argmax", "probability").values(output).tolist() == [0, 0, 1]
    assert column("argmax", "logit").values(output).tolist() == [1, 1, 1]
    assert torch.equal(column("probability", "probability").values(output), torch.cat([1 - output, output], dim=1))
    assert column("plain", "logit", "bool").values(torch.tensor([[0.2], [-0.2]])).tolist() == [[True], [False]]
    rows = torch.tensor([[0.2, 0.5, 0.3]])
    whole = plan(["p"], 1, [VECTOR], [(3,)], ["probability"], on_spark=False, scales=["probability"])[0]
    assert torch.equal(whole.values(rows), rows)


@pytest.mark.parametrize(
    ("last", "loss", "scales"),
    [
        ([torch.nn.Sigmoid()], lambda output, label: ((output - label) ** 2).mean(), ("probability",)),
        ([torch.nn.Flatten(0), torch.nn.Sigmoid()], F.binary_cross_entropy, ("probability",)),
        ([], torch.nn.BCELoss(), ("probability",)),
        ([], F.binary_cross_entropy_with_logits, ("binary_logit",)),
        ([], torch.nn.BCEWithLogitsLoss(), ("binary_logit",)),
        ([], torch.nn.MultiLabelSoftMarginLoss(), ("binary_logit",)),
        ([], torch.nn.CrossEntropyLoss(), ("logit",)),
        ([], functools.partial(F.cross_entropy, label_smoothing=0.1), ("logit",)),
        ([], F.mse_loss, ("",)),
    ],
)
def test_a_torch_classifier_says_what_its_numbers_are(last, loss, scales):
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), *last)
    assert output_scales(net, [loss], 1) == scales
    assert output_scales(net, [], 2) == ("", "")


def test_each_logit_of_a_binary_loss_is_that_of_a_class_of_its_own():
    logits = torch.tensor([[2.0, 2.0, -2.0], [-1.0, 0.0, 3.0]])

    def column(kind, scale="binary_logit", type_=VECTOR):
        return plan(["p"], 1, [type_], None, [kind], on_spark=False, scales=[scale])[0]

    assert torch.equal(column("probability").values(logits), torch.sigmoid(logits))
    assert torch.equal(column("probability", "logit").values(logits), torch.softmax(logits, 1))  # an older model
    assert column("argmax").values(logits).tolist() == [0, 2]
    single = torch.sigmoid(logits[:, :1])
    assert torch.allclose(column("probability").values(logits[:, :1]), torch.cat([1 - single, single], 1))
    assert column("plain", type_="bool").values(logits[:, :1]).tolist() == [[True], [False]]


@pytest.mark.parametrize("kind", ["probability", "argmax"])
def test_classes_of_several_dimensions_are_refused(kind):
    rows = torch.zeros(4, 2, 3)
    with pytest.raises(ValueError, match=r"'p': '.*' takes one number for each class.*\(2, 3\).*output_kinds='array'"):
        plan(["p"], 1, [VECTOR], [(2, 3)], [kind], on_spark=False)
    for shapes in (None, [(-1, 3)]):
        (column,) = plan(["p"], 1, [VECTOR], shapes, [kind], on_spark=False)
        with pytest.raises(DataError, match=r"\(2, 3\) for a row: output_kinds='array' keeps the numbers"):
            column.values(rows)
        assert len(column.values(rows[:, :1])) == 4
    assert plan(["p"], 1, [VECTOR], [(1, 3)], [kind], on_spark=False)


def test_classes_are_float64_on_spark_and_int64_elsewhere():
    types = [plan(["g"], 1, [VECTOR], [(3,)], ["argmax"], on_spark)[0].type for on_spark in (True, False)]
    assert types == ["float64", "int64"]
    assert [column.type for column in plan(["a", "b"], 2, ["int64", VECTOR], None, ["plain", "array"], True)] == [
        "int64",
        ARRAY,
    ]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_spark_has_a_type_for_the_output_of_any_label(dtype):
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from hvd_cluster.estimators.spark.rows import spark_type

    types = [output_type(ColumnKind.BOOL if dtype == "bool" else ColumnKind.NUMERIC, dtype, ())]
    column = plan(["p"], 1, types, None, None, on_spark=True)[0]
    assert spark_type(column.type).typeName()
    assert np.can_cast(dtype, column.type)


def test_contradictions_are_named():
    with pytest.raises(ValueError, match="output_cols has 1 names for 2 outputs"):
        model(output_cols=["p"], output_kinds=["probability", "argmax"]).transform(TABLE)
    with pytest.raises(ValueError, match="output_kinds has 1 entries for 2 outputs"):
        plan(["a"], 2, [VECTOR] * 2, None, ["plain"], False)
    with pytest.raises(ValueError, match="'columns' needs the shapes of the outputs"):
        plan(["a"], 1, [VECTOR], None, ["columns"], False)
    with pytest.raises(ValueError, match="'columns' needs the shapes of the outputs"):
        plan(["a"], 1, [VECTOR], [(-1, -1)], ["columns"], False)
    with pytest.raises(ValueError, match="output_kinds='best' must be a list of 'plain'"):
        model(output_kinds="best")
