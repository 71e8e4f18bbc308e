"""The whole path in local processes: data of every kind in, a model out."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

import hvd_cluster.torch as hvd
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import TorchEstimator, TorchModel
from hvd_cluster.estimators.backend import LocalBackend

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HERE = Path(__file__).parents[1]


def estimator(backend=None, **params):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    given = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05),
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "epochs": 2,
        "batch_size": 16,
        "verbose": 0,
        "scale_lr": False,
        "random_seed": 3,
        "backend": backend,
        **params,
    }
    return TorchEstimator(**given)


def test_a_pandas_frame_is_fitted_in_processes_of_its_own_with_one_progress_bar(frame, capfd):
    fit = estimator(num_proc=2, verbose=1, validation=0.2)
    before = fit.getModel().weight.clone()
    model = fit.fit(frame)
    assert isinstance(model, TorchModel)
    assert torch.equal(fit.getModel().weight, before)
    assert not torch.equal(model.getModel().weight, before)
    assert model.getRunId().startswith("pytorch_")
    assert [record["epoch"] for record in model.getHistory()] == [0, 1]
    assert "epoch 2/2" in capfd.readouterr().err
    scored = model.transform(frame)
    assert np.mean((scored["y__output"] - frame["y"]) ** 2) < np.var(frame["y"])


@pytest.mark.slow
def test_the_progress_of_a_fit_says_what_its_steps_are_spent_on(frame, capfd):
    def slow_on_rank_1(record, model):
        """After each epoch, so that the first step of the next one is late."""
        time.sleep(0.4 * hvd.rank())

    backend = LocalBackend(2, env={"HOROVOD_MONITOR_INTERVAL_SECONDS": "0.1"})
    model = estimator(backend, verbose=1, epochs=6, callbacks=[slow_on_rank_1]).fit(frame)
    shown = capfd.readouterr().err
    assert "[monitor]" not in shown
    assert "Rank 1 on 127.0.0.1 was last in " in shown
    shares = model.getHistory()[-1]["time_share"]
    assert max(shares[0], key=shares[0].get) == "late"
    assert shares[1]["late"] < shares[0]["late"]


@pytest.mark.slow
def test_the_default_group_of_torch_is_ready_in_the_workers(frame):
    def check(record, model):
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        if (dist.get_backend(), total.item()) != ("hvd", 2.0):
            raise AssertionError(f"{dist.get_backend()}: {total}")

    model = estimator(LocalBackend(2), epochs=1, callbacks=[check], torch_backend="hvd").fit(frame)
    assert len(model.getHistory()) == 1


def test_every_kind_of_local_data_gives_the_same_model(frame, two_workers, tmp_path):
    table = pa.Table.from_pandas(frame[["x", "y"]], preserve_index=False)
    pq.write_table(table, tmp_path / "rows.parquet")
    models = [estimator(two_workers).fit(data) for data in (frame, table, str(tmp_path / "rows.parquet"))]
    first, *others = [model.getModel().weight for model in models]
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-6, rtol=0)
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 203


def test_the_store_keeps_the_run_and_not_the_data(frame, one_worker, tmp_path):
    estimator(one_worker, store=str(tmp_path), run_id="mine").fit(frame)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    left = [name for name in left if not name.startswith("runs/mine/logs/")]
    assert left == ["runs/mine/checkpoint"]


def test_a_bool_label_is_predicted_where_the_logit_is_positive(frame, one_worker):
    data = frame.assign(y=frame["y"] > 1)
    model = estimator(one_worker, loss=F.binary_cross_entropy_with_logits, epochs=4).fit(data)
    logits = model.setOutputCols(["o", "guess"]).setOutputKinds(["array", "argmax"]).transform(data)
    plain = model.copy().setOutputCols(["o"]).setOutputKinds(["plain"]).transform(data)["o"]
    assert plain.tolist() == [row[0] > 0 for row in logits["o"]] == (logits["guess"] == 1).tolist()
    assert any(0 < row[0] < 0.5 for row in logits["o"])


def test_without_feature_cols_all_others_are_features(frame, one_worker):
    data = frame[["x", "y", "w", "v"]]
    model = estimator(one_worker, feature_cols=None, sample_weight_col="w", validation="v").fit(data)
    assert model.getFeatureColumns() == ["x"]


class TwoOutputs(torch.nn.Module):
    """Two numbers by name, in another order than the label columns."""

    def __init__(self):
        super().__init__()
        self.z, self.y = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x):
        return {"z": self.z(x), "y": self.y(x)}


def test_outputs_with_the_names_of_the_label_columns_are_trained_and_scored_by_name(one_worker):
    torch.manual_seed(0)
    rows = pd.DataFrame({"x": list(np.ones((64, 2), "float32")), "y": 1.0, "z": -1.0})
    net = TwoOutputs()
    fit = estimator(one_worker, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), batch_size=8, epochs=5)
    model = fit.setFeatureCols(["x"]).setLabelCols(["y", "z"]).setLoss(F.mse_loss).setValidation(None).fit(rows)
    with torch.no_grad():
        found = model.getModel()(torch.ones(1, 2))
    assert (found["y"].item(), found["z"].item()) == pytest.approx((1.0, -1.0), abs=0.05)
    scored = model.transform(rows[:1])
    assert (scored["y__output"][0], scored["z__output"][0]) == pytest.approx((1.0, -1.0), abs=0.05)


def test_a_number_of_rows_in_input_shapes_stands_for_any(one_worker):
    rows = pd.DataFrame({"x": list(np.ones((42, 4), "float32")), "y": 1.0, "v": [False] * 32 + [True] * 10})
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    fit = estimator(one_worker, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), batch_size=8, epochs=1)
    fit.setFeatureCols(["x"]).setLabelCols(["y"]).setLoss(F.mse_loss).setValidation("v").setInputShapes([[8, 2, 2]])
    model = fit.fit(rows)
    assert "validation" in model.getHistory()[0]
    assert len(model.transform(rows[:20])) == 20


def test_params_can_be_given_to_fit(frame, one_worker):
    fit = estimator(one_worker)
    short, long = fit.fit(frame, [{fit.epochs: 1}, {fit.epochs: 3}])
    assert (len(short.getHistory()), len(long.getHistory())) == (1, 3)
    assert fit.getEpochs() == 2


def test_a_fitted_model_is_saved_loaded_and_trained_on(frame, one_worker, tmp_path):
    fit = estimator(one_worker)
    model = fit.fit(frame)
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    assert loaded.transform(frame).equals(model.transform(frame))
    further = fit.copy({fit.model: loaded.getModel(), fit.optimizer: loaded.getOptimizer()}).fit(frame)
    assert further.getHistory()[0]["train"]["loss"] < model.getHistory()[0]["train"]["loss"]


def test_two_fits_at_once_do_not_meet(frame, tmp_path):
    models = {}

    def run(seed):
        models[seed] = estimator(LocalBackend(1), store=tmp_path, random_seed=seed, epochs=1).fit(frame)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert models[1].getRunId() != models[2].getRunId()
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert not torch.equal(models[1].getModel().weight, models[2].getModel().weight)


def test_a_fit_that_goes_astray_says_so_once(frame, two_workers, caplog):
    labels = frame["y"].to_numpy().copy()
    labels[5] = np.inf
    with pytest.raises(
        WorkerFailedError,
        match=r"the loss is inf on rank [01] in step \d+ of epoch 0, and terminate_on_nan is set \(True\): "
        "label column 'y' holds infinities in 1 of 16 rows of this batch",
    ) as caught:
        estimator(two_workers).fit(frame.assign(y=labels))
    assert "raised hvd_cluster.errors.DataError" in str(caught.value).rpartition("Of the others")[2]
    model = estimator(two_workers, terminate_on_nan=False).fit(frame.assign(y=labels))
    assert not np.isfinite([record["train"]["loss"] for record in model.getHistory()]).any()
    (line,) = [record.getMessage() for record in caplog.records if "training loss" in record.getMessage()]
    assert f"run {model.getRunId()!r}: in epoch 0 the training loss is nan" in line


def test_a_subclass_brings_its_own_backend_model_class_and_arguments(frame, two_workers):
    class MyModel(TorchModel): ...

    class Mine(TorchEstimator):
        def __init__(self, **kwargs):
            super().__init__()
            self._set(**kwargs)

        def _fit(self, dataset):
            return super()._fit(dataset)

        def _get_or_create_backend(self):
            return two_workers

        def get_model_class(self):
            return MyModel

        def _get_model_kwargs(self, model, history, optimizer, run_id, metadata):
            arguments = super()._get_model_kwargs(model, history, optimizer, run_id, metadata)
            assert {"_metadata", "input_shapes", "loss", "loss_constructors"} <= arguments.keys()
            return {**arguments, "output_cols": ["guess"]}

    base = estimator()
    runs = two_workers.runs
    values = {row.name: base.getOrDefault(row.key) for row in base.param_rows.values() if base.isSet(row.key)}
    model = Mine(**values).fit(frame)
    assert isinstance(model, MyModel)
    assert two_workers.runs == runs + 1
    assert "guess" in model.transform(frame)


@pytest.mark.slow
def test_it_fits_pandas_where_pyspark_ray_and_tensorflow_cannot_be_found():
    fit_without_spark(sys.executable, PYTHONPATH=str(HERE / "scripts"))


@pytest.mark.slow
def test_it_fits_pandas_in_an_environment_without_pyspark_ray_and_tensorflow(tmp_path):
    venv.create(tmp_path, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("pyspark", "py4j", "ray", "tensorflow")):
            (site / entry.name).symlink_to(entry)
    fit_without_spark(tmp_path / "bin" / "python")


def fit_without_spark(python, **variables):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [str(python), str(HERE / "scripts" / "fit_without_spark.py")],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "y__output", "Estimator:hvd_cluster.estimators.stages.plain_stage"]


def test_a_constructed_loss_says_whether_outputs_are_probabilities(one_worker):
    class Certain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return torch.sigmoid(x * self.scale)

    frame = pd.DataFrame({"x": np.linspace(-3, 3, 32, dtype=np.float32)})
    frame["y"] = (frame["x"] > 0).astype(np.float32)
    model = Certain()
    fitted = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_constructors=torch.nn.BCELoss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=1,
        backend=one_worker,
        verbose=0,
    ).fit(frame)
    fitted.setOutputKinds(["probability", "argmax"]).setOutputCols(["p", "guess"])
    scored = fitted.transform(frame)
    assert (scored["guess"] == frame["y"]).all()
    assert np.stack(scored["p"].tolist()).min() < 0.2
