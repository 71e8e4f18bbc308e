"""A fit reads one version of a table while other programs write to it, and continues with that version only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch

from hvd_cluster.data import open_table
from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchEstimator

deltalake = pytest.importorskip("deltalake")


def table_of(begin: int, stop: int) -> pa.Table:
    x = np.arange(begin, stop) / 100
    return pa.table({"x": x, "y": 2 * x + 1, "held_out": np.arange(begin, stop) % 5 == 0})


@pytest.fixture
def path(tmp_path: Path) -> str:
    deltalake.write_deltalake(str(tmp_path / "table"), table_of(0, 90))
    deltalake.write_deltalake(str(tmp_path / "table"), table_of(90, 100), mode="append")
    deltalake.DeltaTable(str(tmp_path / "table")).delete("x >= 0.8")
    return str(tmp_path / "table")


def estimator(store: Path, **params: Any) -> TorchEstimator:
    torch.manual_seed(0)
    return TorchEstimator(
        model=torch.nn.Linear(1, 1),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        label_shapes=[[-1, 1]],
        batch_size=8,
        num_proc=1,
        **{"epochs": 2, "store": str(store), "verbose": 0, "random_seed": 1, **params},
    )


def weights(model: Any) -> list[float]:
    return [float(value) for tensor in model.getModel().state_dict().values() for value in tensor.flatten()]


@pytest.mark.parametrize(
    "validation", [0.25, *(pytest.param(given, marks=pytest.mark.slow) for given in (None, "held_out"))]
)
def test_a_fit_on_a_path_and_one_on_the_same_rows_are_equal(
    tmp_path: Path, path: str, validation: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = estimator(tmp_path / "a", validation=validation, verbose=1).fit(path)
    assert "of version 2 of the Delta table" in "".join(capsys.readouterr())
    if validation != 0.25:  # a share is drawn from each file, or else from the whole
        rows = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("x")
        assert weights(fitted) == weights(estimator(tmp_path / "b", validation=validation).fit(rows))
    assert fitted.getHistory()[-1]["train"]["loss"] > 0


@pytest.mark.slow
def test_a_delta_table_object_and_a_pyarrow_data_set_are_fitted(tmp_path: Path, path: str) -> None:
    first = deltalake.DeltaTable(path, version=0)
    dataset = ds.dataset(first.file_uris())
    assert dataset.count_rows() == 90
    assert weights(estimator(tmp_path / "a").fit(first)) == weights(estimator(tmp_path / "b").fit(dataset))


def test_a_run_continues_with_the_version_that_it_began_with(tmp_path: Path, path: str) -> None:
    whole = estimator(tmp_path / "whole", epochs=3).fit(path)
    half = estimator(tmp_path / "half", run_id="run", epochs=1)
    half.fit(path)
    deltalake.write_deltalake(path, table_of(200, 220), mode="append")
    rest = estimator(tmp_path / "half", run_id="run", epochs=3)
    with pytest.raises(DataError, match=r"version 2 and is .* version 3: open_table\(table, version=\.\.\.\)"):
        rest.fit(path)
    assert weights(rest.fit(open_table(path, version=2))) == weights(whole)
