"""Columns to score whose Arrow types are not those of the training."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
import torch

from hvd_cluster.estimators import TorchModel

NOON, MIDNIGHT = dt.datetime.fromisoformat("2020-01-02T12:00"), dt.datetime.fromisoformat("2020-01-03")


@pytest.mark.parametrize(
    ("trained", "given", "seen"),
    [
        (pa.decimal128(10, 2), pa.array([0.129, 0.25]), [0.129, 0.25]),
        (pa.date32(), pa.array([NOON, MIDNIGHT]), [NOON, MIDNIGHT]),
        (pa.bool_(), pa.array([2, -3]), [2, -3]),
        (pa.list_(pa.bool_()), pa.array([[2, 3]]), [[2, 3]]),
        # Those of the training, where they hold the same values; floats are rounded.
        (pa.date32(), pa.array([MIDNIGHT]), np.array(["2020-01-03"], "datetime64[D]")),
        (pa.bool_(), pa.array([1, 0]), np.array([True, False])),
        (pa.float32(), pa.array([0.1, None]), np.array([0.1, np.nan], np.float32)),
    ],
)
def test_a_feature_gets_its_type_of_the_training_unless_it_would_lose_values(trained, given, seen):
    found = []

    def preprocess(batch):
        found.append(batch["x"])
        return np.zeros((len(batch["x"]), 1), np.float32)

    model = TorchModel(
        model=torch.nn.Linear(1, 1),
        preprocess=preprocess,
        feature_columns=["x"],
        label_columns=["y"],
        _metadata={"feature_schema": pa.schema([("x", trained)])},
    )
    model.transform(pa.table({"x": given}))
    (column,) = found
    if isinstance(seen, np.ndarray):
        assert column.dtype == seen.dtype
        np.testing.assert_array_equal(column, seen)
    elif isinstance(seen[0], dt.datetime):
        assert column.astype("datetime64[us]").tolist() == seen
    else:
        assert [each.tolist() if isinstance(each, np.ndarray) else each for each in column] == seen


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_timestamps_without_a_zone_are_in_that_of_the_training(unit):
    new_york = pa.timestamp("us", "America/New_York")
    given = [NOON, dt.datetime.fromisoformat("2020-11-01T01:30"), dt.datetime.fromisoformat("2020-03-08T02:30"), None]
    # Five hours before UTC in winter, four in summer; 01:30 comes twice on one day, and 02:30 not at all on another.
    expected = ["2020-01-02T17:00", "2020-11-01T05:30", "2020-03-08T07:00", "NaT"]
    found = []

    def preprocess(batch):
        found.append(batch["x"])
        return np.zeros((len(batch["x"]), 1), np.float32)

    model = TorchModel(
        model=torch.nn.Linear(1, 1),
        preprocess=preprocess,
        feature_columns=["x"],
        label_columns=["y"],
        _metadata={"feature_schema": pa.schema([("x", new_york)])},
    )
    model.transform(pa.table({"x": pa.array(given, pa.timestamp(unit))}))
    model.transform(pa.table({"x": pa.array(given, pa.timestamp(unit)).cast(pa.timestamp(unit, "Europe/Berlin"))}))
    np.testing.assert_array_equal(found[0], np.array(expected, "datetime64[us]"))
    np.testing.assert_array_equal(found[1], np.array(given, "datetime64[us]"))
