"""Logs a model of one column for each of many types; a pyfunc must give the outputs of transform."""

import datetime as dt
import json
import logging
import sys
import zlib
from decimal import Decimal

import mlflow.pyfunc
import numpy as np
import pandas as pd
import torch

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.estimators import TorchModel

DAY, MOMENT = dt.date(2024, 1, 2), dt.datetime(2024, 1, 2, 3, 4, 5)  # noqa: DTZ001
COLUMNS = {
    "bools with nulls": pd.array([True, None, False], dtype="boolean"),
    "uint64": np.array([1, 2**53 + 1, 2**64 - 1], "uint64"),
    "lists of bytes": [[b"\x04\x00\x00"], [b"\x01", b""], [None]],
    "lists of dates": [[DAY], [dt.date(1500, 1, 1)], [None]],
    "lists of timestamps": [[MOMENT], [MOMENT, None], []],
    "lists of whole numbers": [[1, None], [2**53 + 1], []],
    "lists of bools": [[True, None], [False], []],
    "lists of strings": [["a", None], ["b\0"], []],
    "lists of floats": [[1.5, None], [2.5], []],
    "lists of lists": [[[1.5, None]], [[2.5], []], []],
    "durations": pd.to_timedelta([1, 2, 3], unit="s"),
    "lists of durations": [[dt.timedelta(seconds=1)], [], [None]],
    "lists of decimals": [[Decimal("1.5"), None], [Decimal("2.5")], []],
    "structs of decimals": [{"a": [Decimal("1.5")]}, {"a": [Decimal("2.25")]}, {"a": []}],
}


def hashed(batch):
    """A number for each value and its type, shape (rows, 1)."""
    (values,) = batch.values()
    return np.array([[zlib.crc32(f"{values.dtype}{value!r}".encode()) % 9973] for value in values], np.float32)


def transformed():
    """As the others; logging must warn until the model applies the function of its training."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("hvd_cluster.estimators.model").addHandler(handler)
    frame = pd.DataFrame({"x": [1.5, 2.5]})
    given = {"model": torch.nn.Identity(), "feature_columns": ["x"], "label_columns": ["y"]}
    model = TorchModel(**given, _metadata={"is_transformed": True, "output_types": ("float32",)})
    model.log_model("untransformed")
    counts = [sum("setTransformationFn" in text for text in warnings)]
    info = model.copy().setTransformationFn(lambda row: {**row, "x": 10 * row["x"]}).log_model("transformed")
    counts.append(sum("setTransformationFn" in text for text in warnings))
    scored = mlflow.pyfunc.load_model(info.model_uri).predict(frame)["y__output"].tolist()
    return [str(counts), counts == [1, 1] and scored == [15.0, 25.0], True]


def main() -> None:
    mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
    found = {"transformed": transformed()}  # first: making the database disables the loggers that there are
    for name, values in COLUMNS.items():
        frame = pd.DataFrame({"x": pd.Series(values)})
        model = TorchModel(
            model=torch.nn.Identity(),
            feature_columns=["x"],
            label_columns=["y"],
            preprocess=hashed,
            output_kinds=["columns"],
            _metadata={"output_types": ("float32",), "output_shapes": ((1,),), "output_names": ("y",), "made": ("x",)},
        )
        model.keep_rows(to_table(frame, ["x"]))
        info = model.log_model(f"model{len(found)}")
        loaded = mlflow.pyfunc.load_model(info.model_uri)
        expected = model.transform(frame)["y__output_0"].tolist()
        found[name] = [str(info.signature.inputs), loaded.predict(frame)["y__output_0"].tolist() == expected]
        example = loaded.input_example
        found[name].append(None if example is None else loaded.predict(example)["y__output_0"].tolist() == expected)
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
