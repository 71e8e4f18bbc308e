"""A class that scores batches of every type, as Ray Data's actors and Ray Serve's replicas call it."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = pd.DataFrame({"text": ["a", "bb", "?", "dddd"], "y": [1.0, 2.0, 3.0, 4.0]})


def lengths(batch):
    if "?" in batch["text"].tolist():
        raise ValueError("no text")
    return np.array([[len(text)] for text in batch["text"]], np.float32)


def test_batches_of_every_type_come_back_with_the_outputs_of_transform():
    torch.manual_seed(0)
    model = TorchModel(
        model=torch.nn.Linear(1, 2),
        preprocess=lengths,
        on_error="skip",
        feature_columns=["text"],
        label_columns=["y"],
        output_kinds=["array"],
    )
    expected = model.transform(ROWS)
    assert len(expected) == 3
    # As Ray sends it to another process.
    predict = cloudpickle.loads(cloudpickle.dumps(model.predictor()))()
    assert predict(ROWS).equals(expected)
    assert predict(pa.Table.from_pandas(ROWS)).to_pandas().y__output.map(list).tolist() == [
        list(row) for row in expected["y__output"]
    ]
    found = predict({"text": ROWS["text"].to_numpy(), "y": ROWS["y"].to_numpy()})
    assert found["text"].tolist() == ["a", "bb", "dddd"]
    assert found["y__output"].shape == (3, 2)
    assert np.array_equal(found["y__output"], np.stack(expected["y__output"]))


def test_batches_that_cannot_be_scored_are_named():
    model = TorchModel(
        model=torch.nn.Linear(1, 2), preprocess=lengths, feature_columns=["text"], label_columns=["y"], on_error="skip"
    )
    predict, table = model.predictor()(), pa.table({"text": ["a"]})
    with pytest.raises(DataError, match="there is no column 'text'; did you mean 'texts'"):
        predict(table.rename_columns(["texts"]))
    needed = "the data lacks columns that the model needs: its feature columns are 'text'"
    with pytest.raises(ValueError, match=f"{needed}\nthere is no column 'text'\nthe data's columns are: 'day'"):
        model.transform(table.rename_columns(["day"]))
    with pytest.raises(DataError, match="there are 2 columns named 'text': rename all but one"):
        model.transform(table.append_column("text", table["text"]))
    with pytest.raises(DataError, match=r"the batch is a builtins.list: .* pandas.DataFrame\(records\)"):
        predict([{"text": "a"}])


class RowByRow(TorchModel):
    def get_prediction_fn(self):
        return lambda model, row: len(row["text"]) + row["y"]


def test_the_function_for_one_row_of_a_subclass_is_called():
    model = RowByRow(model=torch.nn.Linear(1, 1), feature_columns=["text"], label_columns=["y"])
    expected = model.transform(ROWS)
    assert [value for (value,) in expected["y__output"]] == [2.0, 4.0, 4.0, 8.0]
    assert model.predictor()()(ROWS).equals(expected)
