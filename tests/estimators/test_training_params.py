"""The effect of each param of the training loop, against loops written out here or against unchanged results."""

from __future__ import annotations

import queue
import sys
import time
from typing import Any

import cloudpickle
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import DataModule, EarlyStopping, LocalBackend, StopFit, TorchEstimator
from hvd_cluster.estimators.run.data_module import PetastormDataModule
from hvd_cluster.estimators.run.epochs import EpochListener

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def net(outputs=1):
    torch.manual_seed(0)
    return torch.nn.Linear(4, outputs)


def fit(frame, backend, model=None, lr=0.05, **params):
    model = model or net()
    given = {
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "scale_lr": False,
        "random_seed": 5,
        "verbose": 0,
        **params,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return TorchEstimator(model=model, optimizer=optimizer, backend=backend, **given).fit(frame)


def slowly(record, model):
    """A callback that gives the driver time to receive the epoch."""
    time.sleep(0.05)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.getModel().parameters()])


def test_the_same_seed_gives_bitwise_equal_weights(frame, two_workers):
    dropping = torch.nn.Sequential(torch.nn.Dropout(0.4), net())
    first, second, other = (weights(fit(frame, two_workers, dropping, random_seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "params",
    [
        {"inmemory_cache_all": True},
        {"reader_pool_type": "dummy"},
        {"reader_pool_type": "process", "transformation_fn": lambda row: dict(row)},
        {"compress_sparse_cols": True},
        {"checkpoint_every_steps": 5},
    ],
    ids=["in memory", "one thread", "a process", "sparse", "checkpoints"],
)
def test_reader_and_cache_do_not_change_the_weights(frame, one_worker, params):
    data = frame[["x", "y"]]
    assert torch.equal(weights(fit(data, one_worker, **params)), weights(fit(data, one_worker)))


@pytest.mark.parametrize("clip", [{"gradient_clip_norm": 0.5}, {"gradient_clip_value": 0.1}], ids=["norm", "value"])
def test_gradients_are_clipped_after_averaging(frame, one_worker, two_workers, clip):
    two, one = fit(frame, two_workers, **clip), fit(frame, one_worker, batch_size=16, **clip)
    torch.testing.assert_close(weights(two), weights(one), atol=1e-6, rtol=0)
    assert not torch.allclose(weights(two), weights(fit(frame, two_workers)), atol=1e-3)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_changes_the_rates(frame, one_worker, interval):
    halving = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731 - by value
    model = fit(frame, one_worker, lr_scheduler=halving, lr_scheduler_interval=interval, batch_size=64, epochs=3)
    moves = 3 * 4 if interval == "step" else 3
    assert model.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**moves)


def test_a_plateau_lowers_the_rates(frame, two_workers):
    plateau = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)  # noqa: E731
    model = fit(frame, two_workers, lr=2.0, lr_scheduler=plateau, validation=0.2, epochs=4)
    assert model.getOptimizer().param_groups[0]["lr"] < 2.0


def test_a_plateau_in_steps_lowers_the_rates_of_all_ranks_at_once(frame, two_workers, tmp_path):
    plateau = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)  # noqa: E731

    def keep(record, model):
        import hvd_cluster.torch as hvd

        torch.save(model.state_dict(), tmp_path / f"{hvd.rank()}.{record['epoch']}")

    given = {"lr_scheduler": plateau, "lr_scheduler_interval": "step", "callbacks": [keep]}
    model = fit(frame, two_workers, **given)
    assert model.getOptimizer().param_groups[0]["lr"] < 0.05
    for epoch in range(2):
        left, right = (torch.load(tmp_path / f"{rank}.{epoch}") for rank in range(2))
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_bf16_gives_nearly_the_same_result(frame, two_workers):
    half, full = fit(frame, two_workers, mixed_precision="bf16"), fit(frame, two_workers)
    assert not torch.equal(weights(half), weights(full))
    torch.testing.assert_close(weights(half), weights(full), atol=0.1, rtol=0)
    assert weights(half).dtype == torch.float32


def test_balanced_classes_have_equal_weight(frame, two_workers, one_worker):
    data = frame.assign(c=(frame["c"] == 0).astype("int64"))  # one row in five
    counts = np.bincount(data["c"])
    by_hand = {label: len(data) / (2 * count) for label, count in enumerate(counts)}
    given = {"model": net(2), "loss": F.cross_entropy, "label_cols": ["c"]}
    balanced, named = (fit(data, two_workers, class_weights=how, **given) for how in ("balanced", by_hand))
    assert torch.equal(weights(balanced), weights(named))
    weighted = data.assign(weight=np.array([by_hand[label] for label in data["c"]], dtype="float32"))
    column = fit(weighted, two_workers, sample_weight_col="weight", **given)
    torch.testing.assert_close(weights(balanced), weights(column), atol=1e-6, rtol=0)


@pytest.mark.parametrize("how", ["balanced", {0.0: 1.0, 1.0: 3.0}], ids=["balanced", "named"])
def test_class_weights_need_a_label_of_one_number(frame, one_worker, how):
    data = frame.assign(hot=[[float(c == one) for one in range(3)] for c in frame["c"]])
    with pytest.raises(DataError, match=r"'hot' has the shape \(3,\): give a column with one number a row"):
        fit(data, one_worker, net(3), label_cols=["hot"], class_weights=how)


def test_a_fit_ends_early_and_returns_the_best_epoch(frame, two_workers, tmp_path):
    stopping = EarlyStopping(monitor="validation_loss", patience=2)
    given = {"lr": 0.9, "validation": "v", "epochs": 30, "early_stopping": stopping, "return_best": True}
    model = fit(frame, two_workers, store=tmp_path, run_id="r", **given)
    losses = [record["validation"]["loss"] for record in model.getHistory()]
    best = int(np.argmin(losses))
    assert len(losses) == best + 3 < 30
    rows = frame[frame["v"]]
    error = np.mean((model.transform(rows)["y__output"].to_numpy() - rows["y"].to_numpy()) ** 2)
    assert error == pytest.approx(losses[best], rel=1e-4)
    saved = torch.load(tmp_path / "runs" / "r" / "checkpoint.best", weights_only=True)
    assert saved["epoch"] == best + 1
    # Nothing is left to train, and the best epoch is returned again.
    again = fit(frame, two_workers, store=tmp_path, run_id="r", **given)
    assert torch.equal(weights(again), weights(model))


def test_the_best_epoch_of_an_abandoned_attempt_is_not_returned(frame, one_worker, tmp_path):
    def fails(record, model):
        if record["epoch"] == 2:
            raise KeyError("the third epoch is in checkpoint.best, and not in checkpoint")

    def harsh(output, label):
        return 20 * F.mse_loss(output, label)

    given = {"validation": "v", "epochs": 4, "checkpoint_every_epochs": 2, "store": tmp_path, "run_id": "r"}
    with pytest.raises(WorkerFailedError, match="the third epoch"):
        fit(frame, one_worker, callbacks=[fails], return_best=True, **given)
    model = fit(frame, one_worker, loss=harsh, return_best=True, **given)
    losses = [record["validation"]["loss"] for record in model.getHistory()]
    assert min(losses) == losses[1] < losses[2]
    rows = frame[frame["v"]]
    error = np.mean((model.transform(rows)["y__output"].to_numpy() - rows["y"].to_numpy()) ** 2)
    assert error == pytest.approx(losses[1], rel=1e-4)
    assert torch.load(tmp_path / "runs" / "r" / "checkpoint.best", weights_only=True)["epoch"] == 2


def test_the_best_epoch_is_returned_if_the_run_ended_before_it_was_saved(frame, one_worker, tmp_path):
    def harsh(output, label):
        return 20 * F.mse_loss(output, label)

    best = tmp_path / "runs" / "r" / "checkpoint.best"
    given = {"validation": "v", "store": tmp_path, "run_id": "r", "return_best": True}
    fit(frame, one_worker, epochs=1, **given)
    before = best.read_bytes()
    losses = [record["validation"]["loss"] for record in fit(frame, one_worker, epochs=2, **given).getHistory()]
    assert losses[1] < losses[0]
    best.write_bytes(before)  # as after a kill between the two writes
    model = fit(frame, one_worker, loss=harsh, epochs=3, **given)
    assert model.getHistory()[2]["validation"]["loss"] > losses[0]
    rows = frame[frame["v"]]
    error = np.mean((model.transform(rows)["y__output"].to_numpy() - rows["y"].to_numpy()) ** 2)
    assert error == pytest.approx(losses[1], rel=1e-4)
    assert torch.load(best, weights_only=True)["epoch"] == 2


@pytest.mark.slow
def test_weights_of_a_better_epoch_that_were_not_kept_are_missed(frame, tmp_path, capfd):
    def harsh(output, label):
        return 20 * F.mse_loss(output, label)

    given = {"store": tmp_path, "run_id": "r", "verbose": 1}
    fit(frame, LocalBackend(1), epochs=1, **given)
    fit(frame, LocalBackend(1), loss=harsh, epochs=2, **given)
    assert "return_best" not in "".join(capfd.readouterr())
    fit(frame, LocalBackend(1), epochs=2, return_best=True, **given)
    assert "its weights were not kept; the best one from epoch 2 on is returned" in "".join(capfd.readouterr())


def test_a_monitor_that_is_not_in_the_history_is_named(frame, one_worker):
    runs = one_worker.runs
    for name in ("accuracy", "validation_acc"):
        with pytest.raises(DataError, match=f"monitor='{name}' is not in the history, .*validation_accuracy"):
            fit(frame, one_worker, early_stopping=EarlyStopping(monitor=name), metrics={"accuracy": F.l1_loss})
    stopping = EarlyStopping(monitor="train_accuracy")
    with pytest.raises(ValueError, match="monitor='train_accuracy': say mode='max' if higher values are better"):
        fit(frame, one_worker, early_stopping=stopping, metrics={"accuracy": F.l1_loss})
    assert one_worker.runs == runs  # before any worker starts


def test_validation_minibatch_fn_is_called(frame, two_workers):
    def step(model, transform_outputs, loss_fn, inputs, labels, sample_weights, batch_idx):
        outputs, labels = transform_outputs(model(*inputs), labels)
        return outputs, 10 * loss_fn(outputs, labels, sample_weights)

    own, usual = (fit(frame, two_workers, validation="v", validation_minibatch_fn=fn) for fn in (step, None))
    losses = [model.getHistory()[-1]["validation"]["loss"] for model in (own, usual)]
    assert losses[0] == pytest.approx(10 * losses[1])


class TupleModule(DataModule):
    """Yields pairs of features and labels, one epoch at a time."""

    def __enter__(self):
        import pyarrow.parquet as pq

        table = pq.read_table(self.train_dir, columns=["x", "y"])
        self.x, self.y = np.stack(table["x"].to_numpy()), table["y"].to_numpy()
        return self

    def train_data(self):
        mine = range(self.cur_shard, len(self.y), self.shard_count)
        for start in range(0, len(mine) - self.train_batch_size + 1, self.train_batch_size):
            rows = list(mine[start : start + self.train_batch_size])
            yield {"x": self.x[rows]}, [self.y[rows]]

    def val_data(self):
        return None


@pytest.mark.parametrize("module", [TupleModule, PetastormDataModule])
def test_a_data_module_reads_the_rows(frame, two_workers, module, tmp_path):
    model = fit(frame, two_workers, data_module=module, epochs=6, store=tmp_path)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    assert losses[-1] < losses[0] / 3


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"gradient_clip_norm": 1.0}, "gradient_clip_norm has no effect with train_minibatch_fn"),
        ({"gradient_clip_value": 1.0}, "gradient_clip_value has no effect with train_minibatch_fn"),
        ({"mixed_precision": "fp16"}, "needs a scaled loss"),
    ],
)
def test_params_that_train_minibatch_fn_would_ignore_are_named(frame, one_worker, params, text):
    with pytest.raises(ValueError, match=text):
        fit(frame, one_worker, train_minibatch_fn=lambda *given: None, **params)


def test_columns_for_a_data_module_need_one(frame, one_worker):
    with pytest.raises(ValueError, match="continuous_cols needs a data_module"):
        fit(frame, one_worker, continuous_cols=["a"])


def test_existing_parquet_is_fitted(frame, two_workers, tmp_path):
    import pyarrow as pa

    store = Store.create(tmp_path)
    for path, rows in ((store.get_train_data_path(3), frame[:150]), (store.get_val_data_path(3), frame[150:])):
        (tmp_path / path).mkdir(parents=True)
        pq.write_table(pa.Table.from_pandas(rows[["x", "y"]], preserve_index=False), f"{path}/a.parquet")
    estimator = TorchEstimator(
        model=net(),
        optimizer=torch.optim.SGD(net().parameters(), lr=0.05),
        loss=F.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        store=store,
        backend=two_workers,
        verbose=0,
    )
    model = estimator.fit_on_parquet(dataset_idx=3)
    assert model.getHistory()[0].keys() >= {"train", "validation"}
    output = model.transform(frame[150:])["y__output"].to_numpy()
    loss = np.mean((output - frame["y"][150:].to_numpy()) ** 2)
    assert model.getHistory()[0]["validation"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert len(estimator.fit_on_parquet({estimator.epochs: 2}, dataset_idx=3).getHistory()) == 2
    with pytest.raises(DataError, match=r"no Parquet can be read at .*intermediate_train_data\.7"):
        estimator.fit_on_parquet(dataset_idx=7)


def test_driver_callbacks_get_every_epoch_once(frame, two_workers):
    received = []
    queued: queue.Queue[dict[str, Any]] = queue.Queue()  # driver callbacks need not be picklable
    model = fit(frame, two_workers, driver_callbacks=[received.append, queued.put], epochs=3)
    assert queued.qsize() == 3
    assert [record["epoch"] for record in received] == [0, 1, 2]
    assert received == model.getHistory()


def test_an_exception_of_a_driver_callback_reaches_the_caller_unchanged(frame):
    class TrialPruned(Exception): ...

    raised = []

    def prune(record):
        raised.append(TrialPruned(record["epoch"]))
        raise raised[-1]

    with pytest.raises(TrialPruned) as caught:
        fit(frame, LocalBackend(1, verbose=0), driver_callbacks=[prune], callbacks=[slowly], epochs=1000)
    assert caught.value is raised[0]
    assert len(raised) == 1


@pytest.mark.slow  # workers start twice
def test_a_driver_callback_can_stop_a_fit_early_and_get_the_model(frame):
    def stop(record):
        if record["epoch"] == 2:
            raise StopFit

    model = fit(frame, LocalBackend(1, verbose=0), driver_callbacks=[stop], callbacks=[slowly], epochs=1000)
    assert 3 <= len(model.getHistory()) < 1000
    assert "y__output" in model.transform(frame)


def test_a_failure_of_a_view_does_not_end_a_fit(caplog):
    received = []

    def broken(record):
        raise KeyError("no tracking server")

    listener = EpochListener([received.append], views=[broken])
    listener.add([{"epoch": 0}, {"epoch": 1}])
    assert [record["epoch"] for record in received] == [0, 1]
    assert sum("a view of the fit failed at epoch 0" in text for text in caplog.messages) == 1


def test_spark_ml_spellings_mean_the_same(frame, one_worker):
    estimator = TorchEstimator(featuresCol="x", labelCol="y", predictionCol="guess", weightCol="w")
    assert (estimator.getFeatureCols(), estimator.getLabelCols()) == (["x"], ["y"])
    assert (estimator.getFeaturesCol(), estimator.getPredictionCol()) == ("x", "guess")
    assert estimator.setLabelCol("a").getLabelCols() == ["a"]
    model = fit(frame, one_worker, feature_cols="x", output_cols="guess")
    assert "guess" in model.transform(frame)
    assert "other" in model.setPredictionCol("other").transform(frame)
