"""Raw columns of Spark DataFrames through ``preprocess``: with a store and without one, and in transform."""

from __future__ import annotations

import datetime as dt
import decimal
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchEstimator

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.spark("local", "local-cluster", "connect"), pytest.mark.timeout(300)]

ROWS = 96
FEATURES = ["text", "data", "struct", "tags", "day", "moment", "price", "count"]


@pytest.fixture
def frame(spark):
    from pyspark.sql import Row

    def row(i):
        return Row(
            text=None if i % 7 == 0 else f"word {i}",
            data=bytearray(np.array([i, 2 * i], np.float32).tobytes()),
            struct=Row(width=i % 3, data=bytearray(b"x")),
            tags=[str(tag) for tag in range(i % 4)],
            day=None if i % 5 == 0 else dt.date(2024, 1 + i % 12, 1),
            moment=dt.datetime(2024, 1, 1, i % 24),  # noqa: DTZ001
            price=None if i % 6 == 0 else decimal.Decimal(i) / 4,
            count=None if i % 8 == 0 else i,
            y=float(i % 10),
        )

    types = (
        "text string, data binary, struct struct<width int, data binary>, tags array<string>, day date, "
        "moment timestamp, price decimal(10, 2), count int, y double"
    )
    return spark.createDataFrame([row(i) for i in range(ROWS)], types)


def encode(batch):
    numbers = [
        [0.0 if text is None else float(len(text)) for text in batch["text"]],
        *np.stack([np.frombuffer(data, np.float32) for data in batch["data"]], axis=1),
        [struct["width"] for struct in batch["struct"]],
        [len(tags) for tags in batch["tags"]],
        np.where(np.isnat(batch["day"]), 0, batch["day"].astype("datetime64[M]").astype(int) % 12),
        batch["moment"].astype("datetime64[h]").astype(int) % 24,
        np.nan_to_num(batch["price"]),
        np.nan_to_num(batch["count"]),
    ]
    return np.stack([np.asarray(one, np.float32) for one in numbers], axis=1) / 100


def estimator(**params):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    given = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.01),
        "loss": lambda output, label: F.mse_loss(output[:, 0], label),
        "preprocess": encode,
        "feature_cols": FEATURES,
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "num_proc": 2,
        "random_seed": 5,
        "verbose": 0,
        "validation": 0.2,
        **params,
    }
    return TorchEstimator(**given)


def weights(model):
    return torch.cat([one.flatten() for one in model.getModel().state_dict().values()])


def test_raw_columns_train_with_and_without_a_store_and_score_on_spark(frame, tmp_path):
    model = estimator(store=str(tmp_path / "store")).fit(frame)
    direct = estimator().fit(frame)
    assert torch.equal(weights(model), weights(direct))
    scored = model.transform(frame)
    assert scored.columns == [*FEATURES, "y", "y__output"]
    found = scored.select("y", "y__output").toPandas()
    table = frame.toArrow()
    made = model.transform(table)["y__output"].to_pylist()  # without Spark
    assert [list(row) for row in found["y__output"]] == made
    columns = {name: np.array(table[name].to_pylist(), dtype=object) for name in FEATURES}
    columns["day"] = np.array(table["day"].to_pylist(), "datetime64[D]")
    columns["moment"] = table["moment"].to_numpy().astype("datetime64[us]")
    columns["price"] = np.array([np.nan if one is None else float(one) for one in columns["price"]])
    columns["count"] = np.array([np.nan if one is None else one for one in columns["count"]], float)
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(encode(columns)))
    assert np.array_equal(np.array(made, np.float32), expected.numpy())


def test_what_fails_on_a_few_rows_is_named_before_any_data_is_written(frame, tmp_path):
    store = tmp_path / "store"
    with pytest.raises(DataError, match=r"preprocess fails on every row tried: KeyError: 'y' \(.*\); it gets the"):
        estimator(store=str(store), preprocess=lambda batch: batch["y"]).fit(frame)
    assert not list(store.rglob("*.parquet"))
    with pytest.raises(DataError, match="preprocess=fn of an estimator"):
        estimator(feature_cols=["text"], preprocess=None).fit(frame.dropna())
