"""Fits and scores of Ray Datasets, on a cluster of two nodes."""

from __future__ import annotations

import datetime as dt
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from ray_clusters import TestCluster

from hvd_cluster.errors import DataError, LaunchError
from hvd_cluster.estimators import RayBackend, TorchEstimator, TorchModel
from hvd_cluster.estimators.frames import Frame, column_names, kind_of
from hvd_cluster.estimators.ray.data import parts_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRUE = np.array([1.0, -2.0, 3.0, 0.5], dtype="float32")
ROWS = 403  # not a multiple of batches or blocks


def rows() -> list[dict[str, Any]]:
    x = np.random.default_rng(0).standard_normal((ROWS, 4)).astype("float32")
    return [{"id": i, "x": one, "y": float(one @ TRUE)} for i, one in enumerate(x)]


def estimator(store: Path, **params: Any) -> TorchEstimator:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    given: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "num_proc": 2,
        "epochs": 3,
        "batch_size": 16,
        "random_seed": 1,
        "verbose": 0,
        "store": str(store),
    }
    return TorchEstimator(**{**given, **params})


def await_free(num_cpus: float) -> None:
    """Wait for Ray's count of free resources, which lags behind."""
    from hvd_cluster.ray import nodes

    deadline_s = time.monotonic() + 30
    while sum(free.get("CPU", 0) for free in nodes.free_by_node().values()) != num_cpus:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_fit_of_a_dataset_equals_a_fit_of_the_same_rows_elsewhere(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import ray

    data = ray.data.from_items(rows(), override_num_blocks=5)
    assert kind_of(data) is Frame.RAY
    assert column_names(data) == ["id", "x", "y"]
    model = estimator(tmp_path / "ray").fit(data)
    assert list((tmp_path / "ray").rglob("*.parquet")) == []  # the data of the fit is removed

    plain = rows()
    columns = {"x": pa.FixedSizeListArray.from_arrays(np.concatenate([row["x"] for row in plain]), 4)}
    table = pa.table({**columns, "y": [row["y"] for row in plain]})
    local = estimator(tmp_path / "local").fit(table)
    assert model.getHistory()[-1]["padding_rows"] == local.getHistory()[-1]["padding_rows"]
    # The row groups differ, and with them the order of an epoch; the result does not.
    assert model.getModel().weight.detach().numpy() == pytest.approx(TRUE[None], abs=0.05)
    assert local.getModel().weight.detach().numpy() == pytest.approx(TRUE[None], abs=0.05)

    scored = model.transform(data)
    assert scored.columns() == ["id", "x", "y", "y__output"]
    found = sorted(scored.take_all(), key=lambda row: row["id"])
    assert len(found) == ROWS
    x = torch.tensor(np.stack([row["x"] for row in plain]))
    expected = model.getModel()(x).detach().squeeze(1).numpy()
    assert [row["y__output"] for row in found] == pytest.approx(expected, rel=1e-5)


def test_the_same_dataset_gives_the_same_weights_with_a_validation_part(
    ray_cluster: TestCluster, tmp_path: Path
) -> None:
    import ray

    data = ray.data.from_items(rows(), override_num_blocks=7).map(lambda row: {**row, "held": row["id"] % 5 == 0})
    models: list[TorchModel] = [estimator(tmp_path / str(turn), validation="held").fit(data) for turn in range(2)]
    first, second = (model.getModel().state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [record["validation"] for record in models[0].getHistory()] == [
        record["validation"] for record in models[1].getHistory()
    ]


def test_data_that_cannot_be_trained_on_is_named(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import ray

    data = ray.data.from_items([{"x": [1.0] * 4, "y": None if i == 3 else 1.0} for i in range(8)])
    with pytest.raises(DataError, match="'y'.*null|null.*'y'"):
        estimator(tmp_path).fit(data)
    with pytest.raises(ValueError, match="z"):
        estimator(tmp_path, feature_cols=["z"]).fit(data)
    empty = ray.data.range(4).map(lambda row: {"x": [1.0] * 4, "y": 1.0}).filter(lambda row: False)
    with pytest.raises((DataError, ValueError), match="no rows|does not exist|missing"):
        estimator(tmp_path).fit(empty)


def test_the_model_is_tried_before_a_dataset_is_written(
    ray_cluster: TestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr("hvd_cluster.estimators.fit_data.materialize", lambda *given, **more: pytest.fail("written"))
    data = ray.data.from_items(rows(), override_num_blocks=5).map(lambda row: {**row, "y": row["y"] + 0.5})
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrong = estimator(tmp_path, model=net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    with pytest.raises(DataError, match="the loss does not take output and label of 'y'"):
        wrong.fit(data)


def test_transform_keeps_an_unused_column_of_images_of_many_sizes(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import ray

    def with_image(row: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        side = 2 + row["id"] % 3
        return {**row, "image": np.full((side, side), row["id"], "float32")}

    data = ray.data.from_items(rows()[:40], override_num_blocks=3).map(with_image)
    model = estimator(tmp_path / "store", epochs=1).fit(data)
    found = sorted(model.transform(data).take_all(), key=lambda row: row["id"])
    assert [row["image"].shape[0] for row in found] == [2 + i % 3 for i in range(40)]
    assert all(np.isfinite(row["y__output"]) for row in found)
    with pytest.raises(DataError, match="rows of column 'image' differ in shape"):
        estimator(tmp_path / "other", feature_cols=["image"]).fit(data)


def lengths_and_days(batch: dict[str, Any]) -> Any:
    """A feature of text with nulls, of bytes and of dates: float32 of shape (rows, 3)."""
    days = np.where(np.isnat(batch["day"]), 0, batch["day"].astype("datetime64[M]").astype(int) % 12)
    text = [len(text or "") for text in batch["text"]]
    return np.stack([text, [len(data) for data in batch["data"]], days], axis=1).astype(np.float32)


def test_raw_columns_train_and_score_as_a_local_run_of_preprocess_and_model(
    ray_cluster: TestCluster, tmp_path: Path
) -> None:
    import ray

    raw = [
        {
            "id": i,
            "text": None if i % 5 == 0 else "a" * (i % 7),
            "data": b"x" * (i % 3),
            "day": None if i % 4 == 0 else dt.date(2024, 1 + i % 12, 1),
            "y": float(i % 7),
        }
        for i in range(ROWS)
    ]
    data = ray.data.from_arrow(pa.Table.from_pylist(raw)).repartition(4)
    net = torch.nn.Linear(3, 1)
    model = estimator(
        tmp_path,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.001),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["text", "data", "day"],
        preprocess=lengths_and_days,
        epochs=1,
    ).fit(data)
    names = ["text", "data", "day"]
    columns = {name: np.array([row[name] for row in raw], dtype=object) for name in names}
    columns["day"] = columns["day"].astype("datetime64[D]")
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(lengths_and_days(columns)))[:, 0].tolist()
    in_actors = data.map_batches(model.predictor(), batch_format="pyarrow", concurrency=1)
    for scored in (model.transform(data), in_actors):
        found = {row["id"]: row["y__output"] for row in scored.take_all()}
        assert [found[i] for i in range(ROWS)] == expected  # to the bit


def test_a_fit_inside_a_placement_group_writes_its_data_outside_it(ray_cluster: TestCluster, tmp_path: Path) -> None:
    """As in a Tune trial: calls of the program run in its group unless they say otherwise."""
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Trial:
        def fit(self, store: str, num_proc: int, use_current_placement_group: bool) -> str:
            import ray
            import torch

            from hvd_cluster.errors import NotEnoughSlotsError
            from hvd_cluster.estimators import RayBackend, TorchEstimator

            data = ray.data.from_items([{"x": float(i), "y": 2.0 * i} for i in range(32)], override_num_blocks=3)
            net = torch.nn.Linear(1, 1)
            backend = RayBackend(num_proc, use_current_placement_group=use_current_placement_group, verbose=0)
            fit = TorchEstimator(
                model=net,
                optimizer=torch.optim.SGD(net.parameters(), lr=1e-4),
                loss=torch.nn.functional.mse_loss,
                feature_cols=["x"],
                label_cols=["y"],
                input_shapes=[[-1, 1]],
                label_shapes=[[-1, 1]],
                batch_size=8,
                epochs=1,
                backend=backend,
                store=store,
                verbose=0,
            ).fit
            try:
                return f"{len(fit(data).getHistory())} epoch"
            except NotEnoughSlotsError as error:
                return str(error)

    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())
    place = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    trial: Any = ray.remote(Trial).options(num_cpus=1, scheduling_strategy=place).remote()
    try:
        assert ray.get(trial.fit.remote(str(tmp_path / "one"), 1, False), timeout=150) == "1 epoch"
        refused = ray.get(trial.fit.remote(str(tmp_path / "two"), 2, True), timeout=60)
        assert "with room for 0 workers of 1 CPU each in addition to itself, but 2 are needed" in refused
        assert not list(tmp_path.glob("two/**/*.parquet"))
    finally:
        ray.kill(trial)
        remove_placement_group(group)


def test_a_fit_continues_after_an_actor_has_died(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import ray

    data = ray.data.from_items(rows(), override_num_blocks=3)
    marker = tmp_path / "died"

    def die_once(record: dict[str, Any], model: Any) -> None:
        import hvd_cluster.torch as hvd

        if record["epoch"] == 1 and hvd.rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)

    # Without a number of workers each fit counts free resources, just after an earlier fit has released them.
    as_many_as_fit = {"num_proc": None, "backend": RayBackend(verbose=0)}
    undisturbed = estimator(tmp_path / "undisturbed", **as_many_as_fit).fit(data)
    disturbed = estimator(tmp_path / "disturbed", **as_many_as_fit, callbacks=[die_once], max_restarts=1).fit(data)
    assert marker.exists()
    for model in (undisturbed, disturbed):
        assert [len(record["samples_per_s"]) for record in model.getHistory()] == [4, 4, 4]
    assert [record["epoch"] for record in disturbed.getHistory()] == [0, 1, 2]
    first, second = undisturbed.getModel().state_dict(), disturbed.getModel().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_pandas_data_is_fitted_by_ray_workers(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(rows())
    backend = RayBackend(verbose=0)
    assert backend.num_processes() == 4  # a worker for each free CPU
    model = estimator(tmp_path, num_proc=None, backend=RayBackend(2, verbose=0)).fit(frame)
    assert len(model.getHistory()[-1]["samples_per_s"]) == len(model.getHistory()[-1]["time_share"]) == 2
    assert model.getModel().weight.detach().numpy() == pytest.approx(TRUE[None], abs=0.05)


def test_params_with_ray_object_references_reach_the_workers(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import pandas as pd
    import ray

    factor = ray.put(2.0)

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(ray.get(self.factor))

    torch.manual_seed(0)
    net = Scaled(4, 1)
    net.factor = factor
    model = estimator(
        tmp_path,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=lambda output, label: (output - label).pow(2).mean() * float(ray.get(factor)),
        transformation_fn=lambda row: {**row, "y": row["y"] * float(ray.get(factor))},
        num_proc=None,
        backend=RayBackend(2, verbose=0),
    ).fit(pd.DataFrame(rows()))
    assert model.getModel().weight.detach().numpy() == pytest.approx(TRUE[None], abs=0.05)
    for row in model.transform(ray.data.from_items(rows()[:5])).take_all():
        assert row["y__output"] == pytest.approx(2 * row["y"], abs=0.3)


def test_a_module_that_workers_lack_is_named_before_data_is_written(
    ray_cluster: TestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas as pd

    (tmp_path / "only_here.py").write_text("import torch\nclass Net(torch.nn.Linear): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("only_here").Net(4, 1)
    # As on a cluster of several machines: those of the tests have one.
    monkeypatch.setattr(RayBackend, "is_far", True)
    fit = estimator(
        tmp_path / "store",
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        num_proc=None,
        backend=RayBackend(2, verbose=0),
    ).fit
    with pytest.raises(LaunchError, match=r"cannot import 'only_here'.*'py_modules'.*No data has been written"):
        fit(pd.DataFrame(rows()))
    assert list((tmp_path / "store").rglob("*.parquet")) == []


@pytest.mark.spark("local")
def test_a_spark_dataframe_reaches_ray_workers_through_the_store(
    spark: Any, ray_cluster: TestCluster, tmp_path: Path
) -> None:
    frame = spark.createDataFrame([(row["x"].tolist(), row["y"]) for row in rows()], ["x", "y"])
    model = estimator(tmp_path, num_proc=None, backend=RayBackend(2, verbose=0)).fit(frame)
    assert model.getModel().weight.detach().numpy() == pytest.approx(TRUE[None], abs=0.05)


KERAS = """\
import sys
import time
import keras
import cloudpickle
import numpy as np
import ray
from hvd_cluster.estimators import KerasEstimator
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
x = np.random.default_rng(0).standard_normal((403, 4)).astype("float32")
y = x @ np.array([1.0, -2.0, 3.0, 0.5], dtype="float32")
data = ray.data.from_items([{"x": a, "y": float(b)} for a, b in zip(x, y)], override_num_blocks=5)
keras.utils.set_random_seed(0)
net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model = KerasEstimator(
    model=net, optimizer=keras.optimizers.SGD(0.05), loss="mse", feature_cols=["x"], label_cols=["y"], num_proc=2,
    epochs=3, batch_size=16, store=sys.argv[2], random_seed=1, verbose=0,
).fit(data)
scored = model.transform(data).take_all()
print("rows", len(scored), "worst", max(abs(row["y__output"] - row["y"]) for row in scored))
"""


@pytest.mark.skipif(find_spec("keras") is None, reason="needs keras")
def test_a_keras_model_is_fitted_from_a_dataset_and_scores_it(ray_cluster: TestCluster, tmp_path: Path) -> None:
    # A separate process, since a process has one Keras backend.
    script = tmp_path / "driver.py"
    script.write_text(KERAS)
    done = subprocess.run(
        [sys.executable, script, ray_cluster.address, str(tmp_path / "store")],
        env={**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, num_rows, _, worst = done.stdout.split()[-4:]
    assert int(num_rows) == ROWS
    assert float(worst) < 0.2


def test_each_fit_counts_the_available_workers(ray_cluster: TestCluster) -> None:
    import ray

    backend = RayBackend()
    assert backend.num_processes() == 4
    group = ray.util.placement_group([{"CPU": 1}] * 3)
    ray.get(group.ready())
    await_free(1)
    assert backend.num_processes() == 4  # of the same fit
    backend.check()
    assert backend.num_processes() == 1
    ray.util.remove_placement_group(group)
    backend.check_again()
    assert backend.num_processes() == 1  # the workers of that fit start again
    backend.check()  # before Ray's count has changed
    assert backend.num_processes() == 4


def test_a_fit_that_waits_for_a_cpu_says_so(
    ray_cluster: TestCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.util import placement_group, remove_placement_group

    from hvd_cluster.estimators.ray import data

    monkeypatch.setattr(data, "_REPORT_S", 1.0)
    dataset = ray.data.from_items(rows(), override_num_blocks=3)
    group = placement_group([{"CPU": 1}] * int(ray.cluster_resources()["CPU"]))
    ray.get(group.ready())
    with ThreadPoolExecutor(1) as pool:
        try:
            fitted = pool.submit(estimator(tmp_path, epochs=1).fit, dataset)
            deadline_s = time.monotonic() + 60
            while not (told := [text for text in caplog.messages if "no block of the Dataset for 1 s" in text]):
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            assert "and 0 of the cluster's " in told[0]
        finally:
            remove_placement_group(group)
        assert len(fitted.result(120).getHistory()) == 1


def test_a_failed_block_cancels_the_others(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import ray

    dataset = ray.data.range(40, override_num_blocks=4)
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()

        def wait_for(name: str, folder: Path = folder) -> None:
            deadline = time.monotonic() + 30
            while not (folder / name).exists() and time.monotonic() < deadline:
                time.sleep(0.05)

        def on_part(
            part: int, batches: Any, folder: Path = folder, wait_for: Callable[[str], None] = wait_for
        ) -> dict[str, Any]:
            (folder / f"begun-{part}").touch()
            if part == 0:
                wait_for("begun-1")
                (folder / "failed").touch()
                raise ValueError("the disk is full")
            wait_for("failed")
            wait_for("never")  # the driver ends this one
            (folder / f"written-{part}").touch()
            return {}

        with pytest.raises(ValueError, match="the disk is full"):
            parts_of(dataset, ["id"]).each(on_part)
        assert (folder / "begun-1").exists()
        assert not list(folder.glob("written-*"))
