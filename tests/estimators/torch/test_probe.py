from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.schema import Column, ColumnKind, Schema
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.spec import Inputs, MakeObjective
from hvd_cluster.estimators.torch.probe import probe

ROWS = 3


def run(
    net, loss, *, features=None, label=None, metrics=(), weights=False, row_weights=None, shapes=None, made=None, **more
):
    batch = {"x": torch.randn(ROWS, 4) if features is None else features}
    batch["y"] = torch.randn(ROWS) if label is None else label
    batch["w"] = torch.ones(ROWS) if row_weights is None else row_weights
    schema = Schema(tuple(Column(name, ColumnKind.NUMERIC, "float32", tuple(t.shape[1:])) for name, t in batch.items()))
    inputs = Inputs(
        feature_cols=("x",),
        label_cols=("y",),
        sample_weight_col="w" if weights else None,
        input_shapes=shapes,
        made=made,
    )
    objective = None if loss is None else MakeObjective((loss,), False, (1.0,), None)
    return probe(net, inputs, objective, [(metric,) for metric in metrics], batch, schema, **more)


def test_columns_come_in_the_dtype_of_the_model():
    assert run(torch.nn.Linear(4, 1).double(), F.mse_loss).inputs.feature_dtypes == ("float64",)
    # As Horovod did, integers become floats where that works ...
    found = run(torch.nn.Linear(4, 1), F.mse_loss, features=torch.ones(ROWS, 4, dtype=torch.int64))
    assert found.inputs.feature_dtypes == ("float32",)
    # ... and stay integers where only that works.
    embedding = torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    found = run(
        embedding,
        F.cross_entropy,
        features=torch.ones(ROWS, 4, dtype=torch.int32),
        label=torch.ones(ROWS, dtype=torch.int16),
    )
    assert found.inputs.feature_dtypes == ("int64",)


class Apply(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize(
    ("function", "stored", "chosen"),
    [
        (lambda x, c: x * 2, ("uint8", "int16"), ("uint8", "int16")),
        (lambda x, c: x * F.one_hot(c, 9).sum(2), ("uint8", "int16"), ("uint8", "int64")),
        (lambda x, c: F.one_hot(x, 9).sum(2) * c, ("uint8", "int16"), ("int64", "int16")),
        (lambda x, c: F.one_hot(x * c, 9), ("int32", "int32"), ("int32", "int64")),
        (lambda x, c: F.linear(x, torch.ones(1, 4)) + c, ("uint8", "bool"), ("float32", "float32")),
    ],
)
def test_what_training_passes_as_stored_is_scored_as_stored_if_the_model_takes_it(function, stored, chosen):
    batch = {name: torch.ones(ROWS, 4).to(getattr(torch, dtype)) for name, dtype in zip("xc", stored, strict=True)}
    batch["y"] = torch.randn(ROWS)
    schema = Schema(tuple(Column(name, ColumnKind.NUMERIC, "int64", tuple(t.shape[1:])) for name, t in batch.items()))
    inputs = Inputs(feature_cols=("x", "c"), label_cols=("y",))
    found = probe(Apply(function), inputs, None, [], batch, schema, as_stored=True)
    assert found.inputs.feature_dtypes == chosen


def test_an_error_has_the_dtypes_in_which_whole_numbers_were_tried():
    features = torch.ones(ROWS, 4, dtype=torch.uint8)
    with pytest.raises(DataError) as caught:
        run(torch.nn.Embedding(1, 2), None, features=features, as_stored=True)
    text = str(caught.value)
    assert "with whole numbers as uint8: the model does not take" in text
    assert "with whole numbers as int64: the model does not take the feature columns: IndexError" in text


def test_class_labels_stay_integers():
    found = run(torch.nn.Linear(4, 3), F.cross_entropy, label=torch.tensor([0, 1, 2]))
    assert found.inputs.label_dtypes == ("int64",)
    assert found.output_shapes == ((3,),)


def test_an_error_names_the_layer_and_what_preprocess_returned():
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 16)), torch.nn.Linear(16, 1))
    with pytest.raises(DataError) as caught:
        run(net, F.mse_loss, features=torch.randn(ROWS, 7), made=("x",))
    text = str(caught.value)
    assert "(5x7 and 8x16), in layer '0.1', a Linear(in_features=8, out_features=16, bias=True)\n" in text
    assert "preprocess returned one array of shape (rows, 7)\nthe columns are:\n  label 'y'" in text
    assert "forward()" not in text


def test_a_small_integer_label_is_widened_for_the_loss():
    found = run(torch.nn.Linear(4, 3), F.cross_entropy, label=torch.tensor([0, 1, 2], dtype=torch.int32))
    assert found.inputs.label_dtypes == ("int64",)


def test_the_trial_leaves_model_and_generator_as_they_were():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    features, label = torch.randn(ROWS, 4), torch.randn(ROWS)
    generator = torch.get_rng_state()
    run(net, F.mse_loss, features=features, label=label)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert not net.training
    assert all(parameter.grad is None for parameter in net.parameters())


class Counting:
    """A loss, or a metric, with a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, label):
        self.calls += 1
        return F.mse_loss(output, label)


def test_the_trial_leaves_losses_and_metrics_as_they_were():
    loss, metric = Counting(), Counting()
    run(torch.nn.Linear(4, 1), loss, metrics=[metric])
    assert (loss.calls, metric.calls) == (0, 0)


@pytest.mark.parametrize(
    ("net", "loss", "more", "texts"),
    [
        (torch.nn.Linear(5, 1), F.mse_loss, {}, ["does not take the feature columns", "feature 'x'", "(rows, 4)"]),
        (torch.nn.Linear(4, 1), lambda o, l: (o - l) ** 2, {}, ["must return a scalar, not", "(5, 1)", ".mean()"]),
        (torch.nn.Linear(4, 1), lambda o, l: 1.0, {}, ["must return a scalar tensor, not float"]),
        (torch.nn.Linear(4, 1), lambda o, l: (o - l).detach().mean(), {}, ["no gradient reaches"]),
        (torch.nn.Linear(4, 2), F.mse_loss, {}, ["does not take output and label of 'y'", "(5, 2)"]),
        (torch.nn.Linear(4, 5), lambda o, l: ((o - l) ** 2).mean(), {}, ["does not take output and label"]),
        (torch.nn.Linear(4, 1), F.mse_loss, {"shapes": ((-1, 3),)}, ["input_shapes does not fit", "(-1, 3)"]),
        (torch.nn.Linear(4, 1), F.mse_loss, {"metrics": [lambda o, l: o]}, ["metrics[0] must return one number"]),
        (torch.nn.Linear(4, 1), F.mse_loss, {"metrics": [lambda o: 1]}, ["metrics[0] does not take", "TypeError"]),
        (torch.nn.Flatten(0), F.mse_loss, {}, ["one row for each row"]),
        (
            torch.nn.Linear(4, 1),
            lambda o, l: F.mse_loss(o, l),
            {"weights": True},
            ["must take reduction='none' because sample_weight_col"],
        ),
        (
            torch.nn.Linear(4, 1),
            F.mse_loss,
            {"weights": True, "row_weights": torch.ones(ROWS, 2)},
            ["sample_weight_col='w' holds 2 numbers a row"],
        ),
    ],
)
def test_an_error_names_the_shapes_and_what_does_not_fit(net, loss, more, texts):
    with pytest.raises(DataError) as caught:
        run(net, loss, **more)
    for text in texts:
        assert text in str(caught.value)


def test_a_class_or_an_index_that_is_out_of_bounds_is_not_hidden_by_the_dtype_that_was_tried_first():
    with pytest.raises(
        DataError, match=r"^the loss .*label of 'y'.* from 0 to 2\): .*Target 2 is out of bounds"
    ) as caught:
        run(torch.nn.Linear(4, 2), F.cross_entropy, label=torch.tensor([0, 1, 2]))
    assert "Long" not in str(caught.value)
    embedding = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    with pytest.raises(DataError, match="with whole numbers as int64: the model .*index out of range") as caught:
        run(embedding, F.mse_loss, features=torch.full((ROWS, 4), 7))
    assert str(caught.value).count("\n") == 4  # and no complaint twice


def test_a_choice_that_was_refused_keeps_no_copy_of_the_model_in_memory():
    class Net(torch.nn.Sequential):
        pass

    net = Net(torch.nn.Embedding(3, 2), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    gc.collect()
    gc.disable()
    try:
        run(net, F.mse_loss, features=torch.ones(ROWS, 4, dtype=torch.int64))  # floats are refused first
        assert sum(type(one) is Net for one in gc.get_objects()) == 1
    finally:
        gc.enable()


def test_columns_of_single_numbers_get_advice_on_input_shapes():
    with pytest.raises(DataError, match=r"input_shapes=\[\[-1, 1\]\] makes it \(rows, 1\)") as caught:
        run(torch.nn.Linear(1, 1), F.mse_loss, features=torch.randn(ROWS))
    assert "a separate argument" not in str(caught.value)
    found = run(torch.nn.Linear(1, 1), F.mse_loss, features=torch.randn(ROWS), shapes=((-1, 1),))
    assert found.output_shapes == ((1,),)

    batch = {"a": torch.randn(ROWS), "b": torch.randn(ROWS, 4), "y": torch.randn(ROWS)}
    schema = Schema(tuple(Column(name, ColumnKind.NUMERIC, "float32", tuple(t.shape[1:])) for name, t in batch.items()))
    inputs = Inputs(feature_cols=("a", "b"), label_cols=("y",), sample_weight_col=None, input_shapes=None)
    with pytest.raises(DataError, match="each feature column is a separate argument of the model") as caught:
        probe(torch.nn.Linear(5, 1), inputs, MakeObjective((F.mse_loss,), False, (1.0,), None), [], batch, schema)
    assert "input_shapes=[[-1, 1], [-1, 4]]" in str(caught.value)


def test_a_label_of_one_number_meets_an_output_of_one_column():
    seen = []

    def loss(output, label):
        seen.append((tuple(output.shape), tuple(label.shape)))
        return F.mse_loss(output, label)

    run(torch.nn.Linear(4, 1), loss)
    assert seen == [((5, 1), (5, 1))]


def test_with_a_custom_training_step_only_the_input_is_tried():
    assert run(torch.nn.Linear(4, 2), None).output_shapes == ((2,),)


class Difference(torch.nn.Module):
    """Takes ids of any dtype: one from the other, before anything is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.line((ids - ids[:, :1]).float())


LARGE = torch.arange(12).reshape(ROWS, 4) + 2**40


def test_whole_numbers_that_a_float_cannot_hold_stay_int64_where_the_model_takes_them(caplog):
    assert run(Difference(), F.mse_loss, features=LARGE).inputs.feature_dtypes == ("int64",)
    assert run(Difference(), F.mse_loss, features=LARGE - 2**40).inputs.feature_dtypes == ("float32",)
    doubled = run(torch.nn.Linear(4, 1).double(), F.mse_loss, features=LARGE)
    assert doubled.inputs.feature_dtypes == ("float64",)
    assert not caplog.records


def test_a_model_that_only_takes_floats_gets_a_warning_of_what_they_cannot_hold(caplog):
    found = run(torch.nn.Linear(4, 1), F.mse_loss, features=LARGE)
    assert found.inputs.feature_dtypes == ("float32",)
    (record,) = caplog.records
    assert "column 'x' holds 1099511627777, which becomes 1099511627776.0 in the model's float32" in record.message
    found.inputs.warn_of_inexact({"x": LARGE, "y": torch.zeros(ROWS)})  # once for each fit
    assert len(caplog.records) == 1


def test_a_model_that_takes_neither_gets_the_message_about_its_floats_first():
    with pytest.raises(DataError) as raised:
        run(torch.nn.Linear(5, 1), F.mse_loss, features=LARGE)
    assert "mat1 and mat2 shapes cannot be multiplied" in str(raised.value)


def test_labels_and_doubles_that_are_rounded_to_other_whole_numbers_are_named(caplog):
    run(torch.nn.Linear(4, 1), F.mse_loss, label=torch.arange(ROWS)[:, None] + 2**25)
    assert "column 'y' holds 33554433" in caplog.text
    caplog.clear()
    run(torch.nn.Linear(4, 1), F.mse_loss, features=torch.full((ROWS, 4), 1_700_000_001.0, dtype=torch.float64))
    assert "column 'x' holds 1700000001.0" in caplog.text
    caplog.clear()
    run(torch.nn.Linear(4, 1), F.mse_loss, features=torch.full((ROWS, 4), 0.1, dtype=torch.float64))
    assert not caplog.records  # fractions are rounded by every float


def test_whole_numbers_that_are_stored_as_floats_are_class_labels_where_the_loss_takes_no_floats(caplog):
    """As StringIndexer of Spark ML makes them."""
    caplog.set_level("INFO")
    label = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    found = run(torch.nn.Linear(4, 3), F.cross_entropy, label=label)
    assert found.inputs.label_dtypes == ("int64",)
    assert any("label 'y': the loss takes no floats" in text for text in caplog.messages)
    assert found.inputs.labels({"y": label}, torch.device("cpu"))[0].tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"label column 'y' holds 1\.5: the loss takes whole numbers only"):
        found.inputs.checked({"y": torch.tensor([1.0, 1.5])})
    assert run(torch.nn.Linear(4, 1), F.mse_loss, label=label).inputs.label_dtypes == ("float32",)
    with pytest.raises(DataError, match="the loss does not take output and label of 'y'"):
        run(torch.nn.Linear(4, 3), F.cross_entropy, label=label + 0.5)


def test_bools_are_class_labels_where_the_loss_takes_classes():
    label = torch.tensor([True, False, True])
    found = run(torch.nn.Linear(4, 2), F.cross_entropy, label=label)
    assert found.inputs.labels({"y": label}, torch.device("cpu"))[0].tolist() == [1, 0, 1]
    found = run(torch.nn.Linear(4, 1), F.binary_cross_entropy_with_logits, label=label)
    assert found.inputs.label_dtypes == ("float32",)


@pytest.mark.parametrize(("size", "shape"), [(1, (4,)), (3, (3, 4)), (32, (32, 2, 2)), (4, (-1, 4))])
def test_no_more_rows_than_a_batch_has_are_tried(size, shape):
    seen = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(shape[-1], 1)

        def forward(self, x):
            seen.append(x.numel() // 4)
            return self.last(x).reshape(max(1, x.numel() // 4), -1).mean(dim=1)

    run(Net(), F.mse_loss, shapes=(shape,), batch_size=size)
    assert set(seen) == {min(size, 5)}
