from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import TorchEstimator
from hvd_cluster.estimators import prepared_data as util
from hvd_cluster.launch.horovod.hosts import host_hash


def test_data_is_prepared_once_for_several_fits(frame, one_worker, tmp_path):
    net = torch.nn.Linear(4, 1)
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.05), "loss": F.mse_loss, "verbose": 0}
    fit = TorchEstimator(model=net, feature_cols=["x"], label_cols=["y"], store=tmp_path, backend=one_worker, **given)
    with util.prepare_data(1, tmp_path, frame, ["y"], ["x", "a"], validation="v") as index:
        train_rows, val_rows, metadata, row_bytes = util.get_dataset_properties(index)
        assert (train_rows, val_rows) == (int((~frame["v"]).sum()), int(frame["v"].sum()))
        assert metadata["x"] == {"shape": 4, "dtype": "float32", "intermediate_format": "list"}
        assert row_bytes >= 20
        assert util.get_simple_meta_from_parquet(tmp_path, ["y"], ["x"], dataset_idx=index)[:2] == (
            train_rows,
            val_rows,
        )
        util.check_shape_compatibility(metadata, ["x"], ["y"], [[-1, 2, 2]], [[-1, 1]])
        with pytest.raises(ValueError, match=r"column 'x' has 4 numbers per row, but input_shapes says \[-1, 5\]"):
            util.check_shape_compatibility(metadata, ["x"], ["y"], [[-1, 5]])
        # An estimator may still name the validation column, although the split has removed it.
        models = [each.fit_on_parquet(dataset_idx=index) for each in (fit, fit.copy().setValidation("v"))]
        assert all("validation" in model.getHistory()[0] for model in models)
    assert list(tmp_path.rglob("*.parquet")) == []
    with pytest.raises(KeyError):
        util.get_dataset_properties(index)


def test_prepared_lists_of_any_length_can_be_fitted_with_a_function_over_rows(one_worker, tmp_path):
    frame = pd.DataFrame({"x": [[1.0] * (1 + row % 3) for row in range(24)], "y": np.arange(24.0)})
    net = torch.nn.Linear(1, 1)
    fit = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-4),
        loss=F.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        transformation_fn=lambda row: {"x": row["x"].sum().astype("float32"), "y": row["y"]},
        store=tmp_path,
        backend=one_worker,
        verbose=0,
    )
    with pytest.raises(DataError, match="x"), util.prepare_data(1, tmp_path, frame, ["y"], ["x"]):
        pass
    with util.prepare_data(1, tmp_path, frame, ["y"], ["x"], validation=0.25, allow_ragged=True) as index:
        assert "validation" in fit.fit_on_parquet(dataset_idx=index).getHistory()[0]
        assert util.get_dataset_properties(index)[2]["x"]["shape"] == -1


@pytest.mark.parametrize("validation", [None, 0.25, "v"])
@pytest.mark.parametrize("inside", [True, False])
def test_parquet_is_prepared_like_a_frame(frame, one_worker, tmp_path, validation, inside):
    store, path = tmp_path / "store", tmp_path / ("store/given" if inside else "given")
    path.mkdir(parents=True)
    frame.to_parquet(path / "rows.parquet")
    given = sorted(path.rglob("*"))
    net = torch.nn.Linear(4, 1)
    options = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.05), "loss": F.mse_loss, "verbose": 0}
    fit = TorchEstimator(model=net, feature_cols=["x"], label_cols=["y"], store=store, backend=one_worker, **options)
    with util.prepare_data(1, store, str(path), ["y"], ["x"], validation=validation) as index:
        known = util.get_dataset_properties(index)[:2]
        assert sum(known) == len(frame)
        assert util.get_simple_meta_from_parquet(store, ["y"], ["x"], dataset_idx=index)[:2] == known
        history = fit.fit_on_parquet(dataset_idx=index).getHistory()[0]
        assert ("validation" in history) == (validation is not None) == (known[1] > 0)
    assert sorted(path.rglob("*")) == given
    assert list(store.glob("intermediate_*/*.parquet")) == []


def test_data_of_a_dead_process_is_removed_by_the_next(tmp_path):
    prepare = """
import os
import sys

import pandas as pd

from hvd_cluster.estimators.prepared_data import prepare_data

frame = pd.DataFrame({"x": [1.0, 2.0], "y": [1.0, 2.0]})
with prepare_data(1, sys.argv[1], frame, ["y"]):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", prepare, str(tmp_path)], check=False).returncode == 9
    assert list(tmp_path.rglob("*.parquet"))
    # Another process: this one may have had contexts before.
    again = prepare.replace("os._exit(9)", "pass")
    done = subprocess.run([sys.executable, "-c", again, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.parquet")) == []


def test_small_helpers(frame):
    assert util.to_list(None, 2) is None
    assert util.to_list(3, 2) == util.to_list([3], 2) == [3, 3]
    with pytest.raises(ValueError, match="2 entries was given where 3 are needed"):
        util.to_list([1, 2], 3)
    util.check_validation("v", frame)
    with pytest.raises(DataError, match="'nothing' does not exist"):
        util.check_validation("nothing", frame)
    with pytest.raises(DataError, match="must be >= 0"):
        util.check_validation(1.5)
    assert host_hash() != host_hash("salt")
