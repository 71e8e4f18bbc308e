"""Models as files of other runtimes: ONNX, which onnxruntime runs, and torch's exported programs."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchModel

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


class Counting(torch.nn.Module):
    """Its values depend on how often it was called, which no file can hold."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


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
