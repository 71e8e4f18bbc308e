"""LightningEstimator in local processes: modules and plain nets in, models out."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import LightningEstimator, TorchModel
from hvd_cluster.estimators.lightning.spec import LightningSpec

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Net(pl.LightningModule):
    """One hidden layer over the columns x and a."""

    def __init__(self, lr=0.05, gamma=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.lr, self.gamma = lr, gamma
        self.first, self.last = torch.nn.Linear(5, 8), torch.nn.Linear(8, 1)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x, a):
        return self.last(self.dropout(torch.tanh(self.first(torch.cat([x, a.reshape(-1, 1)], dim=1)))))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"], batch["a"]).flatten(), batch["y"])
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(batch["y"]))
        return loss

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"], batch["a"]).flatten(), batch["y"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["y"]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.gamma is None:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.gamma)]


def estimator(backend, model=None, **params):
    given = {
        "model": Net() if model is None else model,
        "feature_cols": ["x", "a"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "random_seed": 5,
        "verbose": 0,
        "backend": backend,
        **params,
    }
    return LightningEstimator(**given)


def difference(left, right):
    pairs = zip(left.getModel().parameters(), right.getModel().parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_a_fit_reads_the_live_rows_of_a_table(frame, one_worker, tmp_path):
    deltalake, pyarrow = pytest.importorskip("deltalake"), pytest.importorskip("pyarrow")
    rows = pyarrow.Table.from_pandas(frame.assign(number=range(len(frame))), preserve_index=False)
    deltalake.write_deltalake(str(tmp_path / "table"), rows)
    deltalake.DeltaTable(str(tmp_path / "table")).delete("number >= 40")
    read, given = (estimator(one_worker).fit(data) for data in (str(tmp_path / "table"), rows.slice(0, 40)))
    assert difference(read, given) == 0
    assert [epoch["train"] for epoch in read.getHistory()] == [epoch["train"] for epoch in given.getHistory()]


@pytest.mark.slow
def test_two_workers_reach_the_weights_of_one_on_the_same_global_batches(frame, one_worker, two_workers):
    two = estimator(two_workers, batch_size=8, validation=0.2).fit(frame)
    one = estimator(one_worker, batch_size=16, validation=0.2).fit(frame)
    assert isinstance(two, TorchModel)
    assert difference(one, two) < 1e-5
    assert two.getRunId().startswith("lightning_")
    for ours, alone in zip(two.getHistory(), one.getHistory(), strict=True):
        assert ours["train"]["loss"] == pytest.approx(alone["train"]["loss"], rel=1e-5)
        assert ours["validation"]["loss"] == pytest.approx(alone["validation"]["loss"], rel=1e-5)
        assert ours["logged"]["val_loss"] == ours["validation"]["loss"]
    assert list(two.history["epoch"]) == [0, 1]
    scored = two.transform(frame)
    x, a = torch.tensor(np.stack(frame["x"])), torch.tensor(frame["a"].to_numpy(), dtype=torch.float32)
    with torch.no_grad():
        assert np.allclose(scored["y__output"], two.getModel()(x, a).flatten(), atol=1e-5)


@pytest.mark.parametrize("name", ["group_0_y", "error"])
def test_a_plain_net_with_optimizer_and_loss_is_trained_as_torch_estimator_does(frame, two_workers, name):
    from hvd_cluster.estimators import TorchEstimator

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def fitted(cls, metrics):
        model = net()
        given = {
            "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
            "loss": F.mse_loss,
            "metrics": metrics,
            "sample_weight_col": "w",
            "validation": "v",
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "epochs": 2,
            "random_seed": 5,
            "verbose": 0,
            "scale_lr": False,
            "backend": two_workers,
        }
        return cls(model=model, **given).fit(frame)

    metrics = {"error": F.l1_loss} if name == "error" else [F.l1_loss]
    ours, theirs = (fitted(cls, metrics) for cls in (LightningEstimator, TorchEstimator))
    assert difference(ours, theirs) < 1e-6
    for part in ("train", "validation"):
        one, other = (each.getHistory()[-1][part] for each in (ours, theirs))
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["all_metrics"][0][name] == pytest.approx(other["all_metrics"][0][name], rel=1e-5)
    assert ours.getOptimizer().state_dict()["param_groups"][0]["lr"] == 0.01
    assert (
        ours.getOptimizer().state_dict()["state"][0]["step"] == theirs.getOptimizer().state_dict()["state"][0]["step"]
    )


def test_a_run_that_is_resumed_ends_with_the_weights_of_an_undisturbed_one(frame, two_workers, tmp_path, caplog):
    def fitted(store, run_id, epochs):
        model = Net(gamma=0.5, dropout=0.2)
        return estimator(two_workers, model, store=str(store), run_id=run_id, epochs=epochs).fit(frame)

    straight = fitted(tmp_path / "a", "one", 4)
    first = fitted(tmp_path / "b", "two", 2)
    resumed = fitted(tmp_path / "b", "two", 4)
    assert "run 'two' resumes after epoch 2 of 4" in caplog.text
    assert difference(first, resumed) > 1e-3
    assert difference(straight, resumed) == 0
    assert [record["epoch"] for record in resumed.getHistory()] == [0, 1, 2, 3]
    assert resumed.getHistory()[3]["train"]["loss"] == straight.getHistory()[3]["train"]["loss"]
    shares = [shares for record in resumed.getHistory() for shares in record["time_share"]]
    assert [sum(each.values()) for each in shares] == pytest.approx([1.0] * 8)
    with pytest.raises(DataError, match="203 rows and has 100"):
        estimator(two_workers, store=str(tmp_path / "b"), run_id="two").fit(frame[:100])


class LateNet(Net):
    """Rank 1 computes longer than rank 0."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            time.sleep(0.03)
        return super().training_step(batch, batch_idx)


def test_the_history_says_which_rank_waited_for_the_other(frame, two_workers):
    shares = estimator(two_workers, LateNet()).fit(frame).getHistory()[-1]["time_share"]
    assert max(shares[0], key=shares[0].get) == "late"
    assert max(shares[1], key=shares[1].get) == "compute"


def test_the_weights_that_the_users_checkpoint_found_best_are_returned(frame, two_workers, tmp_path):
    keep = pl.callbacks.ModelCheckpoint(monitor="val_loss", filename="best")
    model = estimator(
        two_workers,
        Net(lr=0.9),  # diverges
        validation=0.3,
        epochs=4,
        callbacks=[keep],
        store=str(tmp_path),
        run_id="one",
        terminate_on_nan=False,
    ).fit(frame)
    losses = [record["validation"]["loss"] for record in model.getHistory()]
    assert min(losses) < losses[-1]
    [file] = (tmp_path / "runs" / "one").glob("best*.ckpt")
    saved = torch.load(file, weights_only=False)
    assert saved["epoch"] == losses.index(min(losses))
    assert torch.equal(saved["state_dict"]["last.weight"], model.getModel().last.weight)


class Spoils(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.last.weight.mul_(50)


def test_the_best_epoch_of_a_course_that_was_left_is_not_returned(frame, one_worker, tmp_path):
    def fitted(epochs, *more):
        keep = pl.callbacks.ModelCheckpoint(monitor="val_loss", filename="best")
        given = {"validation": "v", "callbacks": [keep, *more], "store": str(tmp_path), "run_id": "one"}
        return estimator(one_worker, Net(lr=0.01), epochs=epochs, **given).fit(frame)

    fitted(2)
    checkpoint = tmp_path / "runs" / "one" / "checkpoint"
    before = checkpoint.read_bytes()
    left = [record["validation"]["loss"] for record in fitted(3).getHistory()]
    assert left[2] < left[1] < left[0]
    checkpoint.write_bytes(before)  # as a worker leaves it that has died before it saved the third epoch
    model = fitted(4, Spoils())
    losses = [record["validation"]["loss"] for record in model.getHistory()]
    assert losses[:2] == left[:2]
    assert min(losses[2:]) > left[0]
    rows = frame[frame["v"]]
    x, a = torch.from_numpy(np.stack(rows["x"])), torch.from_numpy(rows["a"].to_numpy("float32"))
    with torch.no_grad():
        error = F.mse_loss(model.getModel()(x, a).flatten(), torch.tensor(rows["y"].to_numpy()))
    assert float(error) == pytest.approx(min(losses[2:]), rel=1e-4)


def test_a_callback_stops_all_workers_early_and_for_good(frame, two_workers, tmp_path, caplog):
    def fitted(patience=1, **params):
        stop = pl.callbacks.EarlyStopping("val_loss", patience=patience, min_delta=1e9)
        given = {"validation": 0.3, "callbacks": [stop], "store": str(tmp_path), "run_id": "one", **params}
        return estimator(two_workers, **given).fit(frame)

    first, again = fitted(epochs=9), fitted(epochs=9)
    assert "was stopped after epoch 2 of 9 and has nothing left to train" in caplog.text
    assert difference(first, again) == 0
    assert len(first.getHistory()) == 2
    assert again.getHistory() == first.getHistory()
    # More epochs are a new beginning: the callback ends it again as soon as it may.
    assert len(fitted(epochs=10).getHistory()) == 3


def test_a_finished_run_is_returned_as_it_was(frame, two_workers, tmp_path):
    def fitted(epochs=3):
        keep = pl.callbacks.ModelCheckpoint(monitor="val_loss", filename="best")
        given = {"validation": 0.3, "callbacks": [keep], "store": str(tmp_path), "run_id": "one"}
        return estimator(two_workers, Net(lr=0.9), epochs=epochs, **given).fit(frame)

    first = fitted()
    assert difference(first, fitted()) == 0
    assert difference(first, fitted(epochs=2)) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)  # workers start three times over
@pytest.mark.parametrize("kept", ["elsewhere", "with the driver"])
def test_the_best_epoch_outlives_the_worker_that_found_it(frame, tmp_path, monkeypatch, kept):
    import os
    import signal

    from hvd_cluster.estimators import LocalBackend

    class Elsewhere(LocalBackend):
        is_far = kept == "with the driver"

    class Spoils(pl.Callback):
        def __init__(self, flag):
            self.flag = flag

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                with torch.no_grad():
                    pl_module.last.weight.mul_(50)

        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 3 and self.flag is not None and not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    path = tmp_path / "rows.parquet"
    frame[["x", "a", "y"]].to_parquet(path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed worker leaves its folder behind
    if kept == "elsewhere":
        # As on Databricks, whose mounts of object stores cannot be written in place.
        mounts = f"import hvd_cluster.data.files.remote_store as s\ns.DATABRICKS_MOUNTS = ({str(tmp_path)!r},)\n"
        (tmp_path / "sitecustomize.py").write_text(mounts)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def fitted(name, flag=None):
        keep = pl.callbacks.ModelCheckpoint(monitor="val_loss")
        given = {"validation": 0.2, "epochs": 5, "callbacks": [Spoils(flag), keep]}
        if kept == "elsewhere":
            given["store"] = str(tmp_path / name)
        return estimator(Elsewhere(2, verbose=0), Net(lr=0.01), **given).fit(str(path))

    disturbed, undisturbed = fitted("a", tmp_path / "died"), fitted("b")
    assert (tmp_path / "died").exists()
    losses = [record["validation"]["loss"] for record in disturbed.getHistory()]
    assert losses.index(min(losses)) == 1
    assert difference(disturbed, undisturbed) == 0


def test_what_the_trainer_is_told_arrives_there(frame, two_workers, tmp_path):
    class Look(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            found = [trainer.log_every_n_steps, trainer.gradient_clip_val, trainer.accumulate_grad_batches]
            (tmp_path / f"{trainer.global_rank}").write_text(str([*found, trainer.world_size]))

    estimator(
        two_workers,
        callbacks=[Look()],
        log_every_n_steps=7,
        backward_passes_per_step=2,
        trainer_args={"gradient_clip_val": 0.5},
        epochs=1,
        logger=pl.loggers.CSVLogger(str(tmp_path / "csv")),
        profiler="simple",
    ).fit(frame)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[7, 0.5, 2, 2]"] * 2
    assert "train_loss" in next((tmp_path / "csv").rglob("metrics.csv")).read_text()


def test_a_trainer_may_be_asked_to_write_no_checkpoints_of_its_own(frame, one_worker, tmp_path):
    off = {"trainer_args": {"enable_checkpointing": False}, "store": str(tmp_path), "run_id": "one"}
    estimator(one_worker, epochs=1, **off).fit(frame)
    assert len(estimator(one_worker, epochs=2, **off).fit(frame).getHistory()) == 2
    assert not list(tmp_path.rglob("*.ckpt"))
    runs = one_worker.runs
    with pytest.raises(ValueError, match="enable_checkpointing=False, and callbacks has ModelCheckpoint"):
        estimator(one_worker, callbacks=[pl.callbacks.ModelCheckpoint(monitor="val_loss")], **off).fit(frame)
    assert one_worker.runs == runs


def test_a_part_of_the_validation_may_be_asked_for(frame, two_workers, tmp_path):
    class Counts(pl.Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            with (tmp_path / str(trainer.global_rank)).open("a") as file:
                file.write("x")

    # 80 rows are 10 batches of 4 rows on each of two ranks.
    data = frame.assign(v=np.arange(len(frame)) < 80)
    given = {"validation": "v", "val_batch_size": 4, "epochs": 1, "callbacks": [Counts()]}
    estimator(two_workers, trainer_args={"limit_val_batches": 0.3}, **given).fit(data)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["xxx"] * 2


def test_rows_are_transformed_and_columns_edited_and_removed(frame, two_workers, tmp_path):
    class Seen(Net):
        def training_step(self, batch, batch_idx):
            text = f"{sorted(batch)} {tuple(batch['x'].shape[1:])} {batch['c'].dtype}"
            (tmp_path / "seen").write_text(text)
            return F.mse_loss(self(batch["x"].flatten(1), batch["a"]).flatten(), batch["y"])

    def double(row):
        return {**row, "a": row["a"] * 2}

    fit = estimator(
        two_workers,
        Seen(),
        feature_cols=["x", "a", "c", "w"],
        transformation_fn=double,
        transformation_edit_fields=[("x", np.float32, (2, 2), False), ("c", np.int16, (), False)],
        transformation_removed_fields=["w"],
        epochs=1,
    )
    assert fit.getTransformationRemovedFields() == ["w"]
    # transform() reads the columns of the data, not those of a training batch.
    assert fit.fit(frame).getFeatureColumns() == ["x", "a", "c", "w"]
    assert (tmp_path / "seen").read_text() == "['a', 'c', 'x', 'y'] (2, 2) torch.int16"


def test_a_fit_names_the_version_of_lightning_too():
    assert object.__new__(LightningSpec).trained_with == ("torch", pl.__name__)


def test_a_loss_that_is_not_finite_ends_the_fit(frame, two_workers):
    with pytest.raises(WorkerFailedError, match=r"on rank 0 in step \d of epoch 0, and terminate_on_nan is set"):
        estimator(two_workers, Net(lr=1e30), max_restarts=0).fit(frame)
    labels = [np.inf, *frame["y"][1:]]
    with pytest.raises(WorkerFailedError, match="label column 'y' holds infinities in 1 of "):
        estimator(two_workers, Net(), max_restarts=0).fit(frame.assign(y=labels))


def test_mistakes_are_named_before_anything_starts(frame, two_workers):
    runs = two_workers.runs
    net = Net()
    with pytest.raises(ValueError, match="optimizer has no effect with a LightningModule") as caught:
        estimator(two_workers, net, optimizer=net.configure_optimizers(), loss=F.mse_loss, metrics=[F.l1_loss]).fit(
            frame
        )
    assert "loss has no effect with a LightningModule" in str(caught.value)
    assert "metrics has no effect with a LightningModule" in str(caught.value)
    with pytest.raises(ValueError, match=r"optimizer is required(.|\n)*loss is required"):
        estimator(two_workers, torch.nn.Linear(4, 1)).fit(frame)
    with pytest.raises(ValueError, match="num_gpus=2 must be 1"):
        estimator(two_workers, num_gpus=2)
    with pytest.raises(RuntimeError, match="async_data_loader_queue_size='many' is not a size"):
        estimator(two_workers, train_async_data_loader_queue_size="many")
    with pytest.raises(ValueError, match="trainer_args=3 must be a dict"):
        estimator(two_workers, trainer_args=3)
    assert two_workers.runs == runs


def test_unfitted_and_fitted_stages_are_saved_and_loaded(frame, one_worker, tmp_path):
    fit = estimator(None, num_proc=1, trainer_args={"gradient_clip_val": 1.0})
    fit.save(str(tmp_path / "estimator"))
    loaded = LightningEstimator.load(str(tmp_path / "estimator"))
    assert (loaded.getTrainerArgs(), loaded.getEpochs()) == ({"gradient_clip_val": 1.0}, 2)
    model = loaded.setBackend(one_worker).setNumProc(None).fit(frame)
    model.save(str(tmp_path / "model"))
    assert TorchModel.load(str(tmp_path / "model")).transform(frame).equals(model.transform(frame))


@pytest.mark.parametrize("reader", ["ours", "a plain module", "a module without rows on a rank"])
def test_every_rank_makes_as_many_validation_steps(frame, two_workers, reader):
    from hvd_cluster.estimators.run.data_module import PetastormDataModule as Plain

    class Lopsided(Plain):
        def val_data(self):
            return [] if self.cur_shard else super().val_data()

    class Gathers(Net):
        def validation_step(self, batch, batch_idx):
            # Every rank must come here as often, or this never ends.
            gathered = self.all_gather(torch.tensor([float(len(batch["y"]))]))
            # The sum of all ranks already: what each rank logs of its own is added up.
            self.log("val_rows", gathered.sum(), reduce_fx="sum", rank_zero_only=True)

    data = frame.assign(v=np.arange(len(frame)) < 33)
    module = {"ours": None, "a plain module": Plain}.get(reader, Lopsided)
    given = {"validation": "v", "val_batch_size": 16, "epochs": 1, "data_module": module}
    model = estimator(two_workers, Gathers(), **given).fit(data)
    # 33 rows are a whole global batch and one row, which the rank without one sees as well; without rows on a rank they
    # are 16 rows and one row, each with one that is seen a second time.
    assert model.getHistory()[0]["logged"]["val_rows"] == (19 if module is Lopsided else 34)


@pytest.mark.slow
def test_two_workers_reach_the_accuracy_of_one_process_on_the_digits(two_workers):
    import pandas as pd
    from sklearn.datasets import load_digits

    class Digits(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch["x"]), batch["digit"])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.003)

    digits = load_digits()
    data = pd.DataFrame({"x": list((digits.data / 16).astype("float32")), "digit": digits.target})
    train, test = data[:1400], data[1400:]
    model = estimator(two_workers, Digits(), feature_cols=["x"], label_cols=["digit"], epochs=20, batch_size=16).fit(
        train
    )
    alone = Digits()
    optimizer = alone.configure_optimizers()
    x, y = torch.tensor(np.stack(train["x"])), torch.tensor(train["digit"].to_numpy())
    for epoch in range(20):
        for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(alone(x[rows]), y[rows]).backward()
            optimizer.step()
    scores = np.stack(model.transform(test)["digit__output"])
    ours = np.mean(scores.argmax(axis=1) == test["digit"])
    with torch.no_grad():
        theirs = np.mean(alone(torch.tensor(np.stack(test["x"]))).argmax(dim=1).numpy() == test["digit"])
    assert ours > 0.9
    assert ours > theirs - 0.02


@pytest.mark.slow
@pytest.mark.timeout(300)  # workers start three times over
def test_a_worker_that_is_killed_during_the_fit_is_replaced_and_the_fit_continues(frame, tmp_path):
    import os
    import signal

    class Dies(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            flag = tmp_path / "died"
            if trainer.global_rank == 1 and trainer.current_epoch == 2 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def fitted(store, **params):
        params = {"num_proc": 2, "epochs": 4, "store": str(store), **params}
        return estimator(None, Net(dropout=0.2), **params).fit(frame)

    disturbed = fitted(tmp_path / "a", callbacks=[Dies()])
    assert (tmp_path / "died").exists()
    assert difference(disturbed, fitted(tmp_path / "b")) == 0
    assert len(disturbed.getHistory()) == 4


def test_data_modules_of_the_users_own_bring_the_batches(frame, two_workers):
    from hvd_cluster.estimators.lightning.datamodule import PetastormDataModule
    from hvd_cluster.estimators.run.data_module import NVTabularDataModule
    from hvd_cluster.estimators.run.data_module import PetastormDataModule as Plain

    class Doubled(PetastormDataModule):
        def train_dataloader(self):
            assert self.kwargs["loader_num_epochs"] == 3
            return super().train_dataloader()

    own = {"train_steps_per_epoch": 11, "validation": 0.2, "max_restarts": 0}
    models = [
        estimator(two_workers, data_module=module, loader_num_epochs=3, **own).fit(frame)
        for module in (None, Plain, Doubled)
    ]
    for other in models[1:]:
        assert len(other.getHistory()) == 2
        assert other.getHistory()[1]["train"]["loss"] < other.getHistory()[0]["train"]["loss"]
        assert other.getHistory()[1]["validation"]["loss"] > 0
    with pytest.raises(WorkerFailedError, match="leave data_module out"):
        estimator(two_workers, data_module=NVTabularDataModule, **own).fit(frame)


def test_the_rates_are_scaled_where_that_is_asked_for_and_under_the_old_path(frame, two_workers, one_worker, tmp_path):
    from hvd_cluster.spark.lightning import LightningEstimator as Old
    from hvd_cluster.spark.lightning import TorchEstimator as OldName

    assert [cls().getScaleLr() for cls in (LightningEstimator, Old, OldName)] == [False, True, True]
    assert issubclass(Old, LightningEstimator)
    scaled = estimator(two_workers, Net(gamma=0.5), scale_lr=True).fit(frame)
    assert difference(scaled, estimator(two_workers, Net(lr=0.1, gamma=0.5)).fit(frame)) < 1e-7
    plain = torch.nn.Sequential(torch.nn.Linear(4, 1))
    given = {"feature_cols": ["x"], "loss": F.mse_loss, "scale_lr": True, "store": tmp_path, "run_id": "resized"}

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            with (tmp_path / f"rates {trainer.world_size}").open("a") as file:
                file.write(f"{trainer.optimizers[0].param_groups[0]['lr']:g} ")

    def fitted(workers, epochs):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        return estimator(workers, plain, optimizer=optimizer, epochs=epochs, callbacks=[Rates()], **given).fit(frame)

    models = [fitted(two_workers, 1), fitted(one_worker, 2)]
    assert [model.getOptimizer().param_groups[0]["lr"] for model in models] == [0.01, 0.01]
    assert [set((tmp_path / f"rates {size}").read_text().split()) for size in (2, 1)] == [{"0.02"}, {"0.01"}]


@pytest.mark.parametrize("synced", [True, False])
def test_the_history_judges_the_model_that_is_returned(frame, two_workers, tmp_path, synced):
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8, momentum=0.9))

        def validation_step(self, batch, batch_idx):
            loss = F.mse_loss(self(batch["x"], batch["a"]).flatten(), batch["y"])
            self.log("val_loss", loss, sync_dist=synced, batch_size=len(batch["y"]))

    class Seen(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            with (tmp_path / str(trainer.global_rank)).open("a") as file:
                file.write(f"{float(trainer.callback_metrics['val_loss'])} ")

    held_out = np.arange(len(frame)) % 7 == 0
    model = estimator(two_workers, Normed(), validation="v", callbacks=[Seen()]).fit(frame.assign(v=held_out))
    recorded = model.getHistory()[-1]["validation"]["loss"]
    rows = frame[held_out]
    with torch.no_grad():
        x, a = torch.tensor(np.stack(rows["x"])), torch.tensor(rows["a"].to_numpy(), dtype=torch.float32)
        error = F.mse_loss(model.getModel()(x, a).flatten(), torch.tensor(rows["y"].to_numpy(), dtype=torch.float32))
    assert recorded == pytest.approx(float(error), rel=1e-5)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.parametrize("rows", [5, 45])
def test_every_validation_row_is_seen_by_a_lightning_data_module(frame, two_workers, rows):
    from hvd_cluster.estimators.lightning.datamodule import PetastormDataModule

    class Counts(Net):
        def validation_step(self, batch, batch_idx):
            seen = self.all_gather(torch.tensor([float(len(batch["y"]))])).sum()  # as often on every rank
            self.log("val_rows", seen, reduce_fx="sum", rank_zero_only=True)

    given = {"validation": "v", "val_batch_size": 10, "epochs": 1, "data_module": PetastormDataModule}
    model = estimator(two_workers, Counts(), **given).fit(frame.assign(v=np.arange(len(frame)) < rows))
    assert model.getHistory()[0]["logged"]["val_rows"] == rows


def test_labels_that_a_hook_of_a_data_module_makes_are_checked(frame, one_worker):
    from hvd_cluster.estimators.lightning.datamodule import PetastormDataModule

    class Smoothed(PetastormDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return {**batch, "c": batch["c"] + 0.5}

    net = torch.nn.Linear(4, 3)
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "loss": F.cross_entropy, "label_cols": ["c"]}
    with pytest.raises(WorkerFailedError, match=r"label column 'c' holds \d\.5: the loss takes whole numbers only"):
        estimator(one_worker, net, feature_cols=["x"], data_module=Smoothed, **given).fit(frame)


def test_modules_with_hooks_of_their_own_for_the_transfer_get_batches_that_are_not_moved_yet():
    from hvd_cluster.estimators.lightning.train import _moves_batches

    class Augments(Net):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

    assert _moves_batches(Augments())
    assert not _moves_batches(Net())


@pytest.mark.parametrize(
    ("reader", "rows"), [("ours", 1), pytest.param("ours", 7, marks=pytest.mark.slow), ("a data module", 7)]
)
def test_a_row_that_a_rank_repeats_counts_nothing(frame, three_workers, rows, reader):
    import torchmetrics

    from hvd_cluster.estimators.lightning.datamodule import PetastormDataModule

    class Logs(Net):
        def __init__(self):
            super().__init__()
            self.error, self.count = torchmetrics.MeanSquaredError(), torchmetrics.SumMetric()
            self.late = torchmetrics.SumMetric()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return dict(batch)  # another object than the loader's

        def validation_step(self, batch, batch_idx):
            output = self(batch["x"], batch["a"]).flatten()
            self.all_gather(torch.ones(1))  # all ranks come here as often
            self.error(output, batch["y"])
            self.count(len(batch["y"]))
            self.log("val_error", self.error)
            self.log("val_loss", F.mse_loss(output, batch["y"]), sync_dist=True, on_step=True, on_epoch=True)
            self.log("val_alone", F.mse_loss(output, batch["y"]))
            self.log("val_largest", (output - batch["y"]).abs().max(), reduce_fx="max", sync_dist=True)

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            self.log("val_rows", float(len(batch["y"])), reduce_fx="sum", sync_dist=True)
            self.late(len(batch["y"]))

        def on_validation_epoch_end(self):
            for name, metric in {"val_count": self.count, "val_late": self.late}.items():
                self.log(name, metric.compute())
                metric.reset()

    module = {"data_module": PetastormDataModule} if reader == "a data module" else {}
    marked = frame.assign(v=np.arange(len(frame)) < rows)
    given = {"validation": "v", "val_batch_size": 2, "epochs": 1, **module}
    fitted = estimator(three_workers, Logs(), **given).fit(marked)
    held_out = marked[marked["v"]]
    x, a = torch.tensor(np.stack(held_out["x"])), torch.tensor(held_out["a"].to_numpy(), dtype=torch.float32)
    with torch.no_grad():
        difference = fitted.getModel()(x, a).flatten().double() - torch.tensor(held_out["y"].to_numpy()).double()
    logged = fitted.getHistory()[0]["logged"]
    for name in ("val_error", "val_loss", "val_alone"):
        assert logged[name] == pytest.approx(float((difference**2).mean()), rel=1e-6), name
    assert logged["val_largest"] == pytest.approx(float(difference.abs().max()), rel=1e-6)
    assert (logged["val_rows"], logged["val_count"], logged["val_late"]) == (rows, rows, rows)


def test_a_short_last_group_of_batches_is_averaged_over_its_own_batches(frame, two_workers):
    from hvd_cluster.estimators import TorchEstimator

    def fitted(cls):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"optimizer": optimizer, "loss": F.mse_loss, "feature_cols": ["x"], "scale_lr": False}
        given |= {"batch_size": 4, "train_steps_per_epoch": 5, "backward_passes_per_step": 4}
        base = {"label_cols": ["y"], "epochs": 2, "random_seed": 5, "verbose": 0, "backend": two_workers}
        return cls(model=model, **given, **base).fit(frame)

    assert difference(fitted(LightningEstimator), fitted(TorchEstimator)) < 1e-6


@pytest.mark.needs("torch>=2.6")
def test_no_code_in_the_best_checkpoint_is_executed(frame, one_worker, tmp_path):
    class Settings:
        """A hyperparameter of a class of the user's own."""

    class Kept(Net):
        def __init__(self, settings):
            super().__init__()
            self.save_hyperparameters()

    class Code:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'executed')!r}, 'w')",)

    class Replaces(pl.Callback):
        def on_fit_end(self, trainer, pl_module):
            path = trainer.checkpoint_callback.best_model_path
            content = torch.load(path, weights_only=False)
            torch.save({**content, "state_dict": Code()}, path)

    best = pl.callbacks.ModelCheckpoint(monitor="val_loss")
    given = {"validation": 0.2, "store": tmp_path / "store", "max_restarts": 0}
    resumed = {"run_id": "kept", **given}
    assert len(estimator(one_worker, Kept(Settings()), callbacks=[best], **resumed).fit(frame).getHistory()) == 2
    assert len(estimator(one_worker, Kept(Settings()), callbacks=[best], epochs=3, **resumed).fit(frame).history) == 3
    with pytest.raises(WorkerFailedError, match=r"not plain data: 'state_dict' holds (__builtin__|builtins)\.exec"):
        estimator(one_worker, callbacks=[best, Replaces()], **given).fit(frame)
    assert not (tmp_path / "executed").exists()


def test_the_columns_of_a_batch_are_not_those_that_transform_reads(frame, two_workers):
    class Packed(Net):
        def training_step(self, batch, batch_idx):
            assert sorted(batch) == ["inputs", "target"]
            x, a = batch["inputs"].split([4, 1], dim=1)
            return F.mse_loss(self(x, a).flatten(), batch["target"])

    def pack(row):
        return {"inputs": np.append(row["x"], row["a"]).astype("float32"), "target": row["y"]}

    model = estimator(
        two_workers, Packed(), transformation_fn=pack, transformation_removed_fields=["x", "a", "y"], epochs=1
    ).fit(frame)
    assert (model.getFeatureColumns(), model.getLabelColumns()) == (["x", "a"], ["y"])
    assert np.isfinite(model.transform(frame)["y__output"]).all()


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
def test_layers_that_a_hook_makes_are_in_the_fitted_model(frame, two_workers, hook):
    class Late(Net):
        def __init__(self):
            super().__init__()
            self.first = None

        def make(self, stage=None):
            if self.first is None:
                torch.manual_seed(0)
                self.first = torch.nn.Linear(5, 8)

    setattr(Late, hook, Late.make)
    model = estimator(two_workers, Late()).fit(frame)
    assert difference(model, estimator(two_workers).fit(frame)) < 1e-6
    assert np.isfinite(model.transform(frame)["y__output"]).all()


def test_layers_without_a_shape_are_named(frame, one_worker):
    lazy = Net()
    lazy.last = torch.nn.LazyLinear(1)
    with pytest.raises(ValueError, match=r"last\.weight, last\.bias have no shape yet, as in LazyLinear"):
        estimator(one_worker, lazy).fit(frame)
