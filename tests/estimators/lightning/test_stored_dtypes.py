"""Integer columns of LightningModules: scored in the dtype in which training_step() passed them to the module."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import LightningEstimator, TorchModel
from hvd_cluster.estimators.spec import Inputs

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

from hvd_cluster.estimators.lightning.callbacks import recorded_dtypes

if find_spec("onnxruntime") is not None:
    import onnxruntime  # here, because its import leaves a file in the temporary folder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FRAME = pd.DataFrame({"u": np.arange(256, dtype="uint8"), "c": np.arange(256, dtype="int16") % 3, "y": 0.0})
#: What training computes: the dtype of the column overflows.
WRAPPED = (FRAME["u"].to_numpy() * np.uint8(2)).astype("float32")


class Doubles(pl.LightningModule):
    """Scores twice the column, in its dtype; the training step checks what it gets."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, u):
        return self.scale * (u * 2)

    def training_step(self, batch, batch_idx):
        output = self(batch["u"])
        assert torch.equal(output.detach(), (batch["u"].int() * 2 % 256).float())
        return F.mse_loss(output, batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Classes(Doubles):
    """Its step converts the second column only, which one_hot() takes as int64."""

    def forward(self, u, c):
        return self.scale * (u * 2) + 0 * F.one_hot(c, 3).sum(1)

    def training_step(self, batch, batch_idx):
        output = self(batch["u"], batch["c"].long())
        assert torch.equal(output.detach(), (batch["u"].int() * 2 % 256).float())
        return F.mse_loss(output, batch["y"])


class Uncallable(Doubles):
    """Its forward() does not take the columns."""

    def forward(self):
        return None

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.scale * batch["u"], batch["y"])


class OfFloats(Doubles):
    """Its step converts the column before the call, by name, of the module or of its forward()."""

    def __init__(self, how="call"):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        u = batch["u"].float()
        output = {"call": lambda: self(u), "name": lambda: self(u=u), "forward": lambda: self.forward(u)}[self.how]()
        return F.mse_loss(output, batch["u"] * 2.0)


class OfPart(Doubles):
    """Its step calls a layer only."""

    def __init__(self, function=lambda u: u * 200):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.function = function

    def forward(self, u):
        return self.layer(self.function(u).float()[:, None]).squeeze(1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layer(self.function(batch["u"].float())[:, None]).squeeze(1), batch["y"])


def fitted(backend, module=Doubles, frame=FRAME, columns=("u",), **more):
    given = {"feature_cols": list(columns), "label_cols": ["y"], "batch_size": 8, "epochs": 1, "verbose": 0}
    return LightningEstimator(model=module(), backend=backend, **given, **more).fit(frame)


def test_transform_computes_in_the_dtype_of_the_training(one_worker, tmp_path):
    model = fitted(one_worker)
    model.save(str(tmp_path / "model"))
    table = pa.Table.from_pandas(FRAME)
    wide = FRAME.assign(u=FRAME["u"].astype("int64"))
    for each in (model, TorchModel.load(str(tmp_path / "model"))):
        assert each._get_metadata()["feature_dtypes"] == ("uint8",)
        for rows in (FRAME, wide, wide.assign(u=wide["u"].astype("float64"))):
            assert np.array_equal(each.transform(rows)["y__output"], WRAPPED)
        assert np.array_equal(each.transform(table)["y__output"].to_numpy(), WRAPPED)
        assert np.array_equal(each.predictor()()({"u": wide["u"].to_numpy()})["y__output"], WRAPPED)
    score = model.get_prediction_fn()
    assert [float(score(model.getModel(), {"u": value})) for value in (127, 128, 200)] == [254, 0, 144]


@pytest.mark.parametrize("how", ["call", "name", "forward"])
def test_a_column_that_training_converts_is_scored_converted(one_worker, tmp_path, how):
    model = fitted(one_worker, lambda: OfFloats(how))
    assert model._get_metadata()["feature_dtypes"] == ("float32",)
    assert model.history["train_loss"].tolist() == [0.0]
    model.save(str(tmp_path / "model"))
    for each in (model, TorchModel.load(str(tmp_path / "model"))):
        for rows in (FRAME, FRAME.astype("int64")):
            assert np.array_equal(each.transform(rows)["y__output"], FRAME["u"] * 2.0)


def test_a_fit_that_is_over_knows_the_dtypes_of_its_training(one_worker, tmp_path):
    for _ in range(2):
        model = fitted(one_worker, OfFloats, store=str(tmp_path), run_id="over")
        assert np.array_equal(model.transform(FRAME)["y__output"], FRAME["u"] * 2.0)


def test_what_training_converts_after_preprocess_is_scored_converted(one_worker):
    model = fitted(one_worker, OfFloats, preprocess=lambda batch: {"u": batch["u"]}, batch_format="numpy")
    assert np.array_equal(model.transform(FRAME)["y__output"], FRAME["u"] * 2.0)


def test_a_doubtful_dtype_is_named(one_worker, caplog):
    model = fitted(one_worker, OfPart)
    (text,) = [text for text in caplog.messages if "returns other outputs" in text]
    assert "calls the model with feature 'u' as uint8; with int64 it returns other outputs" in text
    assert model._get_metadata()["feature_dtypes"] == ("uint8",)


@pytest.mark.parametrize("function", [lambda u: u / 255, lambda u: u.float() * 2])
def test_a_dtype_that_makes_no_difference_is_not_named(one_worker, caplog, function):
    fitted(one_worker, lambda: OfPart(function))
    assert not [text for text in caplog.messages if "returns other outputs" in text]


@pytest.mark.parametrize(
    ("passed", "own", "scored"),
    [
        ("uint8", "float32", "uint8"),
        ("float32", "float32", "float32"),
        ("float64", "float32", "float64"),
        ("float16", "float32", "float32"),  # in mixed precision
        ("bfloat16", "bfloat16", "float32"),  # Trainer(precision="bf16-true")
        ("float64", "float64", "float32"),  # Trainer(precision="64-true")
    ],
)
def test_the_precision_of_the_trainer_is_not_that_of_scoring(passed, own, scored):
    module, dtypes = torch.nn.Linear(1, 1, dtype=getattr(torch, own)), []
    module.forward = lambda u, more=None: u
    before = module.forward
    spec = SimpleNamespace(inputs=Inputs(feature_cols=("u",), label_cols=()), floating_dtype="float32")
    with recorded_dtypes(module, spec, dtypes):
        for other in (passed, "int64"):
            module(torch.ones(1, dtype=getattr(torch, other)), more=1)
            assert module.forward is before
    assert dtypes == [scored]


def test_a_call_with_other_arguments_is_not_one_with_the_features():
    module, dtypes = Doubles(), []
    spec = SimpleNamespace(inputs=Inputs(feature_cols=("u", "c"), label_cols=()), floating_dtype="float32")
    for call in (lambda: module(torch.ones(1)), lambda: module({}), lambda: module(1, 2)):
        with recorded_dtypes(module, spec, dtypes), suppress(TypeError):
            call()
        with recorded_dtypes(module, spec, dtypes):
            pass
        assert not dtypes
        assert "forward" not in vars(module)


@pytest.mark.parametrize("value", [300, -1, 2.5])
def test_a_number_that_the_dtype_cannot_hold_is_refused(one_worker, value):
    model = fitted(one_worker)
    rows = FRAME.assign(u=FRAME["u"].astype(type(value)))
    rows.loc[7, "u"] = value
    scoring = [model.transform, model.predictor()(), lambda rows: model.transform(pa.Table.from_pandas(rows))]
    for score in scoring:
        with pytest.raises(DataError, match=f"feature column 'u' holds {value}, which uint8 cannot hold"):
            score(rows)
    with pytest.raises(DataError, match=f"holds {value}, which uint8 cannot hold"):
        model.get_prediction_fn()(model.getModel(), {"u": value})
    with pytest.raises(DataError, match=f"holds {value}, which uint8 cannot hold"):
        model.export("model.pt2", format="torch", example=rows[5:9])


def test_a_column_that_needs_int64_leaves_others_as_they_are(one_worker):
    model = fitted(one_worker, Classes, columns=["u", "c"])
    assert model._get_metadata()["feature_dtypes"] == ("uint8", "int64")
    assert np.array_equal(model.transform(FRAME)["y__output"], WRAPPED)


def test_a_module_that_transform_cannot_call_keeps_the_dtypes_too(one_worker):
    class OfRow(TorchModel):
        def get_prediction_fn(self):
            return lambda model, row: row["u"]

    class Estimator(LightningEstimator):
        def get_model_class(self):
            return OfRow

    given = {"feature_cols": ["u"], "label_cols": ["y"], "batch_size": 8, "verbose": 0, "backend": one_worker}
    model = Estimator(model=Uncallable(), **given).fit(FRAME)
    assert model._get_metadata()["feature_dtypes"] == ("uint8",)
    assert model.transform(FRAME)["y__output"].tolist() == FRAME["u"].tolist()


@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs onnxruntime")
def test_a_file_takes_the_dtype_of_the_training(one_worker, tmp_path):
    class Halves(Doubles):
        def forward(self, u):
            return self.scale * (u // 2)

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch["u"]), batch["y"])

    frame = FRAME.assign(u=FRAME["u"].astype("int32"))
    model = fitted(one_worker, Halves, frame)
    model.export(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [one.type for one in session.get_inputs()] == ["tensor(int32)"]
    (found,) = session.run(None, {"u": frame["u"].to_numpy()})
    assert np.array_equal(found, frame["u"] // 2)
    fitted(one_worker).export(str(tmp_path / "model.pt2"), format="torch")
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert np.array_equal(program({"u": torch.from_numpy(FRAME["u"].to_numpy())})["y__output"].detach(), WRAPPED)
