"""Models as files of other runtimes: ONNX, which onnxruntime runs, and torch's exported programs."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchModel
from hvd_cluster.estimators.torch.portable_model import optional_imports

if find_spec("onnxruntime") is None:
    pytest.skip("needs onnxruntime", allow_module_level=True)

import onnxruntime  # here, because its import leaves a file in the temporary folder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last = torch.nn.Embedding(9, 8), torch.nn.Linear(9, 3)

    def forward(self, scale, ids):
        return {"logits": self.last(torch.cat([self.embedding(ids).mean(1), scale], dim=1)), "cache": None}


def encode(batch):
    ids = np.array([[len(word) for word in text.split()] for text in batch["text"]])
    return {"ids": ids, "scale": batch["x"][:, None]}


ROWS = pd.DataFrame({"text": ["a bb ccc", "dd e fff", "gggg h i", "j kk l"], "x": [0.5, 1.0, 2.0, 3.0]})


def model(**params):
    given = {"model": Net(), "preprocess": encode, "feature_columns": ["text", "x"], "label_columns": ["y"], **params}
    return TorchModel(**given)


def test_an_onnx_file_has_names_and_takes_any_number_of_rows(tmp_path):
    fitted = model()
    fitted.export(str(tmp_path / "model.onnx"), example=ROWS)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert {one.name for one in session.get_inputs()} == {"ids", "scale"}
    assert [one.name for one in session.get_outputs()] == ["y__output"]
    for rows in (ROWS, ROWS[:1]):
        made = encode({name: rows[name].to_numpy() for name in rows})
        given = {"ids": made["ids"], "scale": made["scale"].astype(np.float32)}
        (found,) = session.run(None, given)
        assert np.allclose(found, np.stack(fitted.transform(rows)["y__output"]), atol=1e-5)


def test_a_program_of_torch_takes_and_returns_dicts(tmp_path):
    fitted = model(output_cols=["score"], output_fn=lambda output: output["logits"])
    fitted.export(str(tmp_path / "model.pt2"), format="torch", example=ROWS)
    made = encode({name: ROWS[name].to_numpy() for name in ROWS})
    given = {"ids": torch.from_numpy(made["ids"]), "scale": torch.from_numpy(made["scale"]).float()}
    found = torch.export.load(tmp_path / "model.pt2").module()(given)
    assert list(found) == ["score"]
    assert np.allclose(found["score"].detach().numpy(), np.stack(fitted.transform(ROWS)["score"]), atol=1e-5)


def test_columns_without_preprocess_go_by_their_own_names(tmp_path):
    rows = pd.DataFrame({"x": [0.5, 1.5, 2.5]})
    fitted = TorchModel(model=torch.nn.Linear(1, 2), feature_columns=["x"], label_columns=["y"], input_shapes=[[-1, 1]])
    fitted.export(str(tmp_path / "model.pt2"), format="torch", example=rows)
    found = torch.export.load(tmp_path / "model.pt2").module()({"x": torch.tensor([[0.5], [1.5]])})
    assert np.allclose(found["y__output"].detach().numpy(), np.stack(fitted.transform(rows)["y__output"])[:2])


class Normalized(torch.nn.Module):
    """With a layer of ours under two names, and another of its kind that stays."""

    def __init__(self):
        super().__init__()
        self.images = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), hvd.SyncBatchNorm(3, momentum=None))
        self.images[1].running_mean += 1
        self.again, self.flat = self.images[1], torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return self.flat(self.again(self.images(x[:, None, :, None])).mean((2, 3)))


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_model_that_leaves_has_no_layer_of_ours(tmp_path, format):
    net = Normalized().eval()
    fitted = TorchModel(model=net, feature_columns=["x"], label_columns=["y"])
    rows = pd.DataFrame({"x": [[1.0, 2.0], [3.0, 4.0]]})
    fitted.export(str(tmp_path / "model"), format, example=rows)
    (logged,) = fitted._flavour().parts
    sink = io.BytesIO()
    torch.save(logged, sink, pickle_module=optional_imports(cloudpickle), _use_new_zipfile_serialization=False)
    assert b"hvd_cluster.torch.sync_batch_norm" not in sink.getvalue()
    assert logged.again is logged.images[1]
    x = torch.tensor(rows["x"].tolist())
    with torch.no_grad():
        assert torch.equal(logged(x), net(x))
    assert isinstance(net.again, hvd.SyncBatchNorm)
    alone = TorchModel(model=hvd.SyncBatchNorm(2), feature_columns=["x"], label_columns=["y"])
    assert type(alone._portable_model()) is torch.nn.SyncBatchNorm


class Counting(torch.nn.Module):
    """Its values depend on how often it was called, which no file can hold."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Exported(torch.nn.Module):
    """Its values are others in the file."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x) if torch.compiler.is_exporting() else x


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x * float("nan"), "apart by nan"),
        (lambda x: torch.where(x > 1, x, float("inf")), "apart by inf"),
        (lambda x: torch.stack([x, x], 1), r"of shape \(2, 2\) instead of \(2,\)"),
    ],
)
def test_nan_and_other_shapes_in_the_file_are_noticed(tmp_path, change, what):
    fitted = TorchModel(model=Exported(change), feature_columns=["x"], label_columns=["y"])
    with pytest.raises(DataError, match=f"other values than the model in output 'y__output', {what}"):
        fitted.export(str(tmp_path / "model"), format="torch", example=ROWS[["x"]])


class Flags(torch.nn.Module):
    def forward(self, x):
        return x > 0.7, torch.where(x > 0.7, x, float("nan")), torch.where(x > 0.7, x, float("inf"))


def test_bools_nan_and_infinity_of_the_model_itself_can_be_exported(tmp_path):
    fitted = TorchModel(model=Flags(), feature_columns=["x"], label_columns=["a", "b", "c"])
    fitted.export(str(tmp_path / "model.onnx"), example=ROWS[["x"]])
    found = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": np.array([0, 1], np.float32)})
    assert [one.tolist()[1] for one in found] == [True, 1.0, 1.0]


def test_output_kinds_are_not_applied_and_do_not_name_outputs(tmp_path):
    fitted = model(output_cols=["p", "c"], output_kinds=["probability", "argmax"])
    fitted.export(str(tmp_path / "model.pt2"), format="torch", example=ROWS)
    made = encode({name: ROWS[name].to_numpy() for name in ROWS})
    given = {"ids": torch.from_numpy(made["ids"]), "scale": torch.from_numpy(made["scale"]).float()}
    found = torch.export.load(tmp_path / "model.pt2").module()(given)
    assert {name: output.shape for name, output in found.items()} == {"y__output": (4, 3)}


class Loop(torch.nn.Module):
    """Tracing fixes the length of ``ids``."""

    def forward(self, ids, scale):
        return scale + sum(ids[:, place] for place in range(int(ids.shape[1])))[:, None]


def test_a_size_that_only_the_file_fixes_is_reported(tmp_path, caplog):
    fitted = model(model=Loop())
    fitted.export(str(tmp_path / "model.pt2"), format="torch", example=ROWS)
    (record,) = [one for one in caplog.records if one.name == "hvd_cluster.estimators.torch.export"]
    assert "one size in dimension 1 of 'ids' (3), dimension 1 of 'scale' (1), while the model" in record.message
    caplog.clear()
    model().export(str(tmp_path / "model.pt2"), format="torch", example=ROWS)
    assert "takes only one size" not in caplog.text


def test_mistakes_are_named_and_nothing_is_written(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(ValueError, match="format='pickle' is not one of 'onnx', 'torch'"):
        model().export(str(path), format="pickle", example=ROWS)
    with pytest.raises(ValueError, match="example is required"):
        model().export(str(path))
    counting = TorchModel(model=Counting(), feature_columns=["x"], label_columns=["y"])
    with pytest.raises(DataError, match="gives other values than the model in output 'y__output'"):
        counting.export(str(path), format="torch", example=ROWS[["x"]])
    assert not path.exists()
