"""LightningEstimator's checkpoints within epochs: a fit that is interrupted ends as one that nobody disturbs."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from needs import missing

from hvd_cluster.data.store import LocalStore
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import DataModule, LightningEstimator
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.run.run_files import RunFiles

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl
import torchmetrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Of the batches of an epoch; there are 11 for two ranks.
EVERY = 3


class Net(pl.LightningModule):
    """What a restart could get wrong: dropout, running means, rates that move in steps, sums of an epoch."""

    def __init__(self, plateau=None, is_logging=True):
        super().__init__()
        torch.manual_seed(0)
        self.plateau, self.is_logging = plateau, is_logging
        self.first, self.norm, self.last = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        self.mean = torchmetrics.MeanMetric()
        self.errors = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
        self.seen = torchmetrics.CatMetric()

    def forward(self, x):
        return self.last(F.dropout(torch.tanh(self.norm(self.first(x))), 0.3, self.training))

    def training_step(self, batch, batch_idx):
        output = self(batch["x"]).flatten()
        loss = F.mse_loss(output, batch["y"])
        if not self.is_logging:
            return loss
        of_epoch = {"on_step": False, "on_epoch": True, "batch_size": len(batch["y"])}
        self.log("train_loss", loss, sync_dist=True, **of_epoch)
        self.log("mine", loss, **of_epoch)
        self.log("both", loss, on_step=True, on_epoch=True, batch_size=len(batch["y"]))
        self.log("most", loss, reduce_fx="max", **of_epoch)
        if batch_idx == 0:
            self.log("first", loss, reduce_fx=sum, on_step=False, on_epoch=True)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.errors(output.detach(), batch["y"])
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.seen.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.last.bias.mul_(0.99)  # after all callbacks

    def on_train_epoch_end(self):
        if self.is_logging:
            self.log("seen", self.seen.compute().std())
            self.seen.reset()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch["x"]).flatten(), batch["y"]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        moving = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
        schedulers = [{"scheduler": moving, "interval": "step"}]
        if self.plateau is not None:
            waiting = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.5)
            schedulers.append({"scheduler": waiting, "interval": self.plateau, "monitor": "val_loss", "strict": False})
        return [optimizer], schedulers


class Accumulates(Net):
    """Makes steps of as many batches as epochs have begun."""

    def on_train_epoch_start(self):
        self.trainer.accumulate_grad_batches = self.current_epoch + 1


class Draws(Net):
    """Draws random numbers when an epoch begins, after all callbacks."""

    def on_train_epoch_start(self):
        torch.rand(3)


class Counts(pl.Callback):
    """Counts what it is called for, and goes on counting in a run that is resumed."""

    def __init__(self, path):
        self.path, self.calls = path, {}

    def state_dict(self):
        return self.calls

    def load_state_dict(self, state_dict):
        self.calls = dict(state_dict)

    def _count(self, name, *args):
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_train_epoch_start(self, *args):
        self._count("epochs begun")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._count(f"batch {batch_idx}")

    def on_train_batch_end(self, trainer, *args):
        self._count("last batches", trainer) if trainer.is_last_batch else None

    def on_validation_epoch_end(self, *args):
        self._count("validations")

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 0:
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            found = {**self.calls, "rates": rates, "steps": trainer.global_step}
            self.path.write_text(json.dumps(found))


class Ends(pl.Callback):
    """Ends a fit before a batch of an epoch, once: by an exception on all ranks, or by killing one of them."""

    def __init__(self, mark, epoch=1, batch=8, victim=None):
        self.mark, self.epoch, self.batch, self.victim = mark, epoch, batch, victim

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) != (self.epoch, self.batch) or self.mark.exists():
            return
        if self.victim is None:
            raise RuntimeError("ended here")
        if trainer.global_rank == self.victim:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fitted(frame, tmp_path, name, backend, net=None, ends=None, **params):
    callbacks = [Counts(tmp_path / f"{name}.json"), *([ends] if ends is not None else [])]
    given = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "random_seed": 5,
        "verbose": 0,
        "validation": 0.2,
        "checkpoint_every_steps": EVERY,
        "max_restarts": 0,
        "store": str(tmp_path / name),
        "run_id": "one",
        **params,
    }
    return LightningEstimator(model=net or Net(), backend=backend, callbacks=callbacks, **given).fit(frame)


def interrupted(frame, tmp_path, backend, name="interrupted", epoch=1, batch=8, **params):
    """A fit that failed amid an epoch, and where it stands."""
    mark = tmp_path / "never"
    with pytest.raises(WorkerFailedError, match="ended here"):
        fitted(frame, tmp_path, name, backend, ends=Ends(mark, epoch, batch), **params)
    found = Checkpoint.load(RunFiles(LocalStore(str(tmp_path / name)), "one"))
    assert found is not None
    return found


def what_was_learned(model):
    """Weights, buffers and what the history says, to compare without tolerance."""
    records = [
        {name: part for name, part in record.items() if name in ("epoch", "train", "validation", "logged")}
        for record in model.getHistory()
    ]
    return {name: value.tolist() for name, value in model.getModel().state_dict().items()}, records


def counts(tmp_path, name):
    return json.loads((tmp_path / f"{name}.json").read_text())


CASES = {
    "as it comes": {},
    "in the first epoch": {"epoch": 0, "batch": 4},
    "several batches in a step": {"backward_passes_per_step": 2, "at": 6},
    "no logging": {"net": Net(is_logging=False)},
    "plateaus of epochs": {"net": Net(plateau="epoch"), "epoch": 2},
    "validation where it is saved": {
        "net": Net(plateau="step"),
        "trainer_args": {"val_check_interval": EVERY},
        "epoch": 1,
    },
    "so many steps": {"trainer_args": {"max_steps": 29}},
    "a callback changes the batches in a step": {
        "trainer_args": {"callbacks": pl.callbacks.GradientAccumulationScheduler({1: 2})},
        "at": 6,
    },
    "the module changes the batches in a step": {"net": Accumulates(), "epoch": 2, "at": 6},
    "without a validation in the epoch": {"trainer_args": {"check_val_every_n_epoch": 2}, "epoch": 2},
    "without a validation in the epoch before": {"trainer_args": {"check_val_every_n_epoch": 2}},
    "validations by batches": {"trainer_args": {"check_val_every_n_epoch": None, "val_check_interval": 15}, "epoch": 2},
    "after the only validation": {"trainer_args": {"val_check_interval": 6}},
}


@pytest.mark.parametrize("case", [*CASES, pytest.param("a process reads", marks=pytest.mark.slow)])
def test_a_fit_that_failed_in_mid_epoch_continues_as_if_it_had_not(frame, two_workers, tmp_path, case):
    params = dict(CASES.get(case, {"reader_pool_type": "process"}))
    where = {"epoch": params.pop("epoch", 1), "batch": params.pop("batch", 8)}
    at = params.pop("at", where["batch"] // EVERY * EVERY)
    undisturbed = fitted(frame, tmp_path, "undisturbed", two_workers, **params)
    found = interrupted(frame, tmp_path, two_workers, **where, **params)
    assert (found.epochs, found.partial_epoch.rows) == (where["epoch"], at * 8 * 2)
    resumed = fitted(frame, tmp_path, "interrupted", two_workers, **params)
    assert what_was_learned(resumed) == what_was_learned(undisturbed)
    expected = counts(tmp_path, "undisturbed")
    expected["epochs begun"] += missing("lightning>=2.5") is not None  # an older one begins the epoch again
    assert counts(tmp_path, "interrupted") == expected
    if case == "as it comes":
        assert counts(tmp_path, "undisturbed") == {
            "epochs begun": 3,
            **{f"batch {index}": 3 for index in range(11)},
            "last batches": 3,
            "validations": 3,
            "rates": [pytest.approx(0.01 * 0.8**8)],
            "steps": 33,
        }


def test_what_a_rank_alone_holds_is_read_without_executing_anything(frame, two_workers, tmp_path):
    found = interrupted(frame, tmp_path, two_workers)
    parts = found.partial_epoch.ranks
    assert [part["has_loss"] for part in parts] == [True, True]
    assert not torch.equal(parts[0]["means"], parts[1]["means"])


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_another_number_of_ranks_continues_where_the_rows_end(frame, two_workers, one_worker, tmp_path, sizes):
    workers = {1: one_worker, 2: two_workers}
    before, after = (workers[size] for size in sizes)
    found = interrupted(frame, tmp_path, before)
    assert found.partial_epoch.rows == 6 * 8 * sizes[0]
    again = fitted(frame, tmp_path, "interrupted", after)
    seen = counts(tmp_path, "interrupted")
    steps_before, steps = ({1: 21, 2: 11}[size] for size in sizes)
    done = 6 * sizes[0] // sizes[1]
    # An epoch and 6 batches before, and afterwards the rest of that epoch and another.
    expected = [(index < steps_before) + (index < 6) + (index >= done) + 1 for index in range(steps)]
    assert [seen[f"batch {index}"] for index in range(steps)] == expected
    assert seen["last batches"] == 3
    assert [record["epoch"] for record in again.getHistory()] == [0, 1, 2]
    assert again.getHistory()[2]["validation"]["loss"] < again.getHistory()[0]["validation"]["loss"]


def test_another_number_of_ranks_makes_steps_of_as_many_batches(frame, two_workers, one_worker, tmp_path):
    class Seen(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.world_size == 2:
                ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
                with (tmp_path / f"steps of {trainer.global_rank}").open("a") as file:
                    file.write(f"{trainer.current_epoch}:{ready} ")

    longer = pl.callbacks.GradientAccumulationScheduler({1: 4})
    params = {"checkpoint_every_steps": 4, "epochs": 2, "trainer_args": {"callbacks": [longer, Seen()]}}
    found = interrupted(frame, tmp_path, one_worker, batch=14, **params)
    assert found.partial_epoch.rows == 12 * 8
    fitted(frame, tmp_path, "interrupted", two_workers, **params)
    # After 6 batches of two ranks a group would be half made: it is made again.
    assert (tmp_path / "steps of 0").read_text() == "1:8 1:11 "


def test_steps_of_which_nothing_would_be_left_leave_one(frame, two_workers, one_worker, tmp_path):
    params = {"train_steps_per_epoch": 9}
    interrupted(frame, tmp_path, two_workers, **params)
    again = fitted(frame, tmp_path, "interrupted", one_worker, **params)
    assert counts(tmp_path, "interrupted")["batch 8"] == 1 + 1 + 1
    assert all(np.isfinite(record["validation"]["loss"]) for record in again.getHistory())


@pytest.mark.slow
def test_the_loaders_of_a_users_data_module_continue_too(frame, two_workers, tmp_path, caplog):
    from torch.utils.data import DataLoader, TensorDataset

    from hvd_cluster.estimators.lightning.datamodule import PetastormDataModule

    class Ours(PetastormDataModule):
        """The reader of the package."""

    class Drawn(PetastormDataModule):
        """Rows in an order, and with noise, that the random generators of the process give."""

        def train_dataloader(self):
            batches = list(self._train_reader().epoch(0))
            x, y = (torch.cat([batch[name] for batch in batches]) for name in ("x", "y"))

            def collate(rows):
                x, y = (torch.stack(column) for column in zip(*rows, strict=True))
                return {"x": x + 0.01 * torch.randn(x.shape), "y": y}

            return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, collate_fn=collate, drop_last=True)

    class Plain(DataModule):
        """The same, without Lightning."""

        def __enter__(self):
            import pyarrow.parquet as pq

            table = pq.read_table(self.train_dir)
            self.x, self.y = (np.stack(table[name].to_numpy()).astype("float32") for name in ("x", "y"))
            return self

        def train_data(self):
            order = np.random.permutation(len(self.x))
            for start in range(0, len(order) - 7, 8):
                rows = order[start : start + 8]
                yield {"x": self.x[rows] + 0.01 * torch.randn(8, 4).numpy(), "y": self.y[rows]}

        def val_data(self):
            return [{"x": self.x[:8], "y": self.y[:8]}]

    class Several(PetastormDataModule):
        """More than one loader."""

        def train_dataloader(self):
            return [super().train_dataloader()]

    class Of(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0] if isinstance(batch, list) else batch, batch_idx)

    for name, module in {"ours": Ours, "drawn": Drawn, "plain": Plain}.items():
        params = {"data_module": module}
        undisturbed = fitted(frame, tmp_path, f"undisturbed {name}", two_workers, **params)
        found = interrupted(frame, tmp_path, two_workers, name, **params)
        assert found.partial_epoch.rows == 6 * 8 * 2
        resumed = fitted(frame, tmp_path, name, two_workers, **params)
        assert what_was_learned(resumed) == what_was_learned(undisturbed), name
    found = interrupted(frame, tmp_path, two_workers, "several", data_module=Several, net=Of())
    assert (found.epochs, found.partial_epoch) == (1, None)


@pytest.mark.parametrize(
    ("every", "where"), [(None, {"epoch": 2, "batch": 0}), (EVERY, {"epoch": 1})], ids=["between epochs", "within one"]
)
def test_a_data_module_continues_whatever_the_model_draws(frame, one_worker, tmp_path, every, where):
    class Loaded(DataModule):
        """Passes over the rows that begin within epochs."""

        def __enter__(self):
            import pyarrow.parquet as pq

            table = pq.read_table(self.train_dir)
            x, y = (torch.from_numpy(np.stack(table[name].to_numpy()).astype("float32")) for name in ("x", "y"))
            self.rows = torch.utils.data.TensorDataset(x, y)
            return self

        def train_data(self):
            for x, y in torch.utils.data.DataLoader(self.rows, self.train_batch_size, shuffle=True):
                yield {"x": x + 0.01 * torch.randn(x.shape), "y": y}

        def val_data(self):
            return None

    params = {"data_module": Loaded, "net": Draws(), "validation": None, "checkpoint_every_steps": every}
    undisturbed = fitted(frame[:125], tmp_path, "undisturbed", one_worker, **params)
    found = interrupted(frame[:125], tmp_path, one_worker, **where, **params)
    assert (found.epochs, found.partial_epoch is None) == (where["epoch"], every is None)
    resumed = fitted(frame[:125], tmp_path, "interrupted", one_worker, **params)
    assert what_was_learned(resumed) == what_was_learned(undisturbed)


def test_a_run_of_an_earlier_version_continues(frame, two_workers, tmp_path):
    """Ranks held less within an epoch then."""
    found = interrupted(frame, tmp_path, two_workers)
    for part in found.partial_epoch.ranks:
        for name in ("accumulate_grad_batches", "numbers", "validation_left_out_rows"):
            del part[name]
    found.save(RunFiles(LocalStore(str(tmp_path / "interrupted")), "one"))
    resumed = fitted(frame, tmp_path, "interrupted", two_workers)
    assert what_was_learned(resumed) == what_was_learned(fitted(frame, tmp_path, "undisturbed", two_workers))


def test_the_best_epoch_is_kept_when_a_run_continues_during_another(frame, two_workers, tmp_path):
    def run(act, name, **params):
        keep = pl.callbacks.ModelCheckpoint(monitor="val_loss", filename="best")
        return act(frame, tmp_path, name=name, backend=two_workers, trainer_args={"callbacks": [keep]}, **params)

    undisturbed = run(fitted, "undisturbed")
    run(interrupted, "interrupted")
    assert what_was_learned(run(fitted, "interrupted")) == what_was_learned(undisturbed)


def test_bad_rows_of_a_validation_before_the_interruption_are_counted(frame, two_workers, tmp_path):
    def small(batch):
        if (np.abs(batch["a"]) > 1.5).any():
            raise ValueError("too large")
        return batch["a"][:, None].astype(np.float32)

    net = torch.nn.Linear(1, 1)
    params = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.01), "loss": F.mse_loss}
    params |= {"feature_cols": ["a"], "preprocess": small, "on_error": "skip", "validation": "v"}
    params |= {"trainer_args": {"val_check_interval": 6}, "train_steps_per_epoch": 11}
    interrupted(frame, tmp_path, two_workers, **params)
    bad = int((frame["a"].abs()[frame["v"]] > 1.5).sum())
    records = fitted(frame, tmp_path, "interrupted", two_workers, **params).getHistory()
    assert [record["validation_left_out_rows"] for record in records] == [bad] * 3
    assert bad > 0


@pytest.mark.slow
@pytest.mark.timeout(300)  # workers start twice
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_worker_that_is_killed_in_mid_epoch_costs_nothing_but_time(frame, two_workers, tmp_path, passes, victim):
    params = {"backward_passes_per_step": passes, "max_restarts": 3}
    undisturbed = fitted(frame, tmp_path, "undisturbed", two_workers, **params)
    mark = tmp_path / "killed"
    killed = fitted(frame, tmp_path, "killed", None, num_proc=2, ends=Ends(mark, victim=victim), **params)
    assert mark.exists()
    assert what_was_learned(killed) == what_was_learned(undisturbed)
    assert counts(tmp_path, "killed") == counts(tmp_path, "undisturbed")
