"""What watches a Lightning fit on a worker: records, reports and checkpoints. Importing this needs Lightning."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.estimators.lightning import rank_part
from hvd_cluster.estimators.lightning.best_file import BestFile
from hvd_cluster.estimators.lightning.completion import hooks_for
from hvd_cluster.estimators.lightning.data import is_repeated
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.epoch_timer import EpochTimer
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.finite_check import FiniteCheck, all_finite
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.schedule import is_due_within
from hvd_cluster.estimators.run.snapshot import Running, Snapshot
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch import random_state
from hvd_cluster.estimators.torch.checkpointing import share_buffers
from hvd_cluster.estimators.torch.means import Means
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.lightning.optimizers import scale_rates

_callbacks: Any = submodule("callbacks")


class Epochs(_callbacks.Checkpoint):
    """Keeps the history of a fit, reports it, and saves the run after and within epochs.

    A ``Checkpoint`` in Lightning's eyes, so that it comes last of all callbacks: what they keep is saved too.

    Args:
        spec: the run.
        hvd: its world.
        best: the file of its best epoch.
        found: what an earlier start of the run has saved.
    """

    def __init__(self, spec: LightningSpec, hvd: Collectives, best: BestFile, found: Snapshot | None) -> None:
        super().__init__()
        self.history = found.history if found is not None else []
        #: Batches of the epoch that an earlier start of the run has made.
        self.done = 0
        #: Of the epoch that goes on.
        self.timer = EpochTimer()
        #: Rows that an epoch goes through a second time; whoever makes the batches knows.
        self.padding_rows = 0
        #: Lightning's hooks that make the trained module's layers of the given one's.
        self.hooks: tuple[str, ...] = ()
        self._spec = spec
        self._hvd = hvd
        self._best = best
        self._reports = Reports(spec, hvd.rank())
        self._trained_on = Fingerprint.of(spec.dataset, spec.inputs)
        self._means = Means([], torch.device("cpu"))
        self._has_loss = False
        self._trainer: Any = None
        #: The number of ranks that an earlier start of the run had.
        self._size_before = found.size if found is not None else None
        self._losses = FiniteCheck(False, hvd, spec.run_id)
        #: Where the first epoch stands, until it goes on there.
        self._running = found.running if found is not None else None

    @property
    def epoch(self) -> int:
        """The number of the epoch that goes on."""
        return len(self.history)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run stands amid an epoch, and has not gone on yet."""
        return self._running is not None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The run goes on in another folder, perhaps, and with another number of ranks by which rates are scaled."""
        self._best.bring_back(trainer, checkpoint, self.history)
        if self._size_before is not None and getattr(trainer.strategy, "scale_lr", False):
            groups = [group for state in checkpoint["optimizer_states"] for group in state["param_groups"]]
            scale_rates(groups, checkpoint["lr_schedulers"], self._hvd.size() / self._size_before)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the fitted model can be made, before it is trained.

        Raises:
            DataError: the module has other weights than hooks make of the one that was given.
        """
        if self._spec.objective is None:
            self.hooks = hooks_for(self._spec.model, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make an epoch that was interrupted begin where it stood: Lightning alone leaves out what is due there."""
        self._trainer = trainer
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._losses = FiniteCheck(self._spec.terminate_on_nan, self._hvd, self._spec.run_id, has_scaler)
        if self._running is not None:
            # Of a number of steps that is given, a smaller number of ranks may have none left.
            self.done = min(self._running.steps(self._spec, self._hvd.size()), trainer.num_training_batches - 1)
            trainer.fit_loop.restarting = False
            trainer.fit_loop.epoch_loop.restarting = False
            self._begin(pl_module)  # the next hook may be left out

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Seed the rank, so that a resumed run draws what an undisturbed one draws."""
        self._begin(pl_module)

    def _begin(self, pl_module: Any) -> None:
        random_state.seed_all(self._spec.seed, self.epoch, self._hvd.rank())
        self.timer = EpochTimer()
        self._means = Means([], pl_module.device)
        self._has_loss = False

    def take_up(self) -> None:
        """Before the first batch of an epoch: go on where it was interrupted, if it was.

        Another number of ranks draws other random numbers, may go through the rest in another order (see
        :func:`hvd_cluster.estimators.run.schedule.steps_of_rows`), and records of the epoch what is of its rest.
        """
        running, self._running = self._running, None
        if running is None:
            return
        loop = self._trainer.fit_loop
        batches = loop.epoch_loop.batch_progress.current
        batches.ready = batches.started = batches.processed = batches.completed = self.done
        loop._data_fetcher.fetched = self.done
        mine = running.of(self._hvd.rank(), self._hvd.size())
        if mine is not None:
            part = torch.load(io.BytesIO(mine), map_location="cpu", weights_only=True)
            self._means.take_up(part["means"])
            self._has_loss = part["has_loss"]
            rank_part.restore(part["lightning"], self._trainer, self._trainer.lightning_module)

    def between_batches(self) -> None:
        """Save the run within the epoch, where that is due; every rank takes part."""
        trainer = self._trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        done = batches.completed
        if batches.ready != done or done % trainer.accumulate_grad_batches:
            return  # amid a step
        if is_due_within(self._spec, done, trainer.num_training_batches):
            self._losses.check(self.epoch, self._has_finite_weights)
            self._save(trainer, done)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the loss up, and report now and then."""
        timer, steps = self.timer, int(trainer.num_training_batches)
        rows = len(next(iter(batch.values()))) if isinstance(batch, Mapping) else self._spec.batch_size
        timer.rows += rows
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._has_loss = True
            if pl_module.automatic_optimization:  # Lightning divides it
                loss = loss * trainer.accumulate_grad_batches
            self._means.add(loss, [], rows)
            self._losses.add(batch_idx, loss)
        if self._losses.is_due(batch_idx + 1):
            self._losses.check(self.epoch)
        if self._reports.is_due(last=batch_idx + 1 == steps):
            self._reports.step(
                epoch=self.epoch,
                epochs=self._spec.epochs,
                step=batch_idx + 1,
                steps=steps,
                loss=float(loss) if isinstance(loss, torch.Tensor) else math.nan,
                samples_per_s=timer.rows_per_s * self._hvd.size(),
                data_wait_share=timer.wait_share,
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Let the gradients of an epoch's last group of batches be their mean, also where the group is short.

        Lightning divides each loss by ``accumulate_grad_batches``. Clipping comes after this.
        """
        batches = trainer.accumulate_grad_batches
        made = trainer.fit_loop.epoch_loop.batch_progress.current.ready % batches
        if made and pl_module.automatic_optimization:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(batches / made)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the record of the epoch, and save the run."""
        self._losses.check(self.epoch, self._has_finite_weights)
        timer = self.timer
        speeds = torch.tensor([[timer.rows_per_s, timer.wait_share]], dtype=torch.float64)
        gathered = self._hvd.allgather(speeds, name="hvd_cluster.speeds")
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        parts = parted(logged)
        means = self._means.over_ranks(self._hvd, "hvd_cluster.train_means")
        if self._has_loss and "loss" not in parts["train"]:
            parts["train"]["loss"] = means["loss"]
        record = {
            "epoch": self.epoch,
            "train": parts["train"],
            "samples_per_s": gathered[:, 0].tolist(),
            "data_wait_share": gathered[:, 1].tolist(),
            "seconds": timer.seconds,
            "padding_rows": self.padding_rows,
            "logged": logged,
        }
        if self._spec.validation_is_there:
            record["validation"] = parts["validation"]
        self.history.append(record)
        self.done = 0
        if len(self.history) % self._spec.checkpoint_every_epochs == 0 or self._is_last(trainer):
            self._save(trainer)
        self._reports.epoch(record)

    def _has_finite_weights(self) -> bool:
        return all_finite(self._trainer.lightning_module.parameters())

    def _is_last(self, trainer: Any) -> bool:
        return self._is_stopped(trainer) or len(self.history) == self._spec.epochs

    @staticmethod
    def _is_stopped(trainer: Any) -> bool:
        """Whether a callback ends the fit here; with ``min_epochs`` it may have asked for it too early."""
        return bool(trainer.should_stop) and getattr(trainer.fit_loop, "_can_stop_early", True)

    def _save(self, trainer: Any, done: int | None = None) -> None:
        """Save after an epoch, or after ``done`` batches of one; every rank takes part."""
        files = RunFiles.of(self._spec)
        if not files.are_kept:
            return
        share_buffers(trainer.lightning_module)
        with scratch_folder("ckpt") as folder:
            path = Path(folder) / "epoch.ckpt"
            trainer.save_checkpoint(path)  # every rank takes part, and rank 0 writes
            running = None if done is None else Running.after(done, self._spec, self._hvd, self._mine(trainer))
            if self._hvd.rank() == 0:
                stopped_of = self._spec.epochs if self._is_stopped(trainer) else None
                body, size = path.read_bytes(), self._hvd.size()
                self._best.keep(trainer, self.history, size, self._trained_on)
                files.save(Snapshot(body, self.history, size, self._trained_on, stopped_of, running).to_bytes())

    def _mine(self, trainer: Any) -> bytes:
        """What this rank alone holds."""
        part = {
            "means": self._means.sums,
            "has_loss": self._has_loss,
            "lightning": rank_part.captured(trainer, trainer.lightning_module),
        }
        buffer = io.BytesIO()
        torch.save(part, buffer)
        return buffer.getvalue()


class AgreeOnLogged(_callbacks.Callback):
    """Comes first: what callbacks judge an epoch by is of all ranks, also where ``self.log`` had no ``sync_dist``.

    Not what the module's own ``on_train_epoch_end`` logs, which comes later.

    Args:
        hvd: the world of the run.
    """

    def __init__(self, hvd: Collectives) -> None:
        super().__init__()
        self._hvd = hvd
        #: The states of the module's torchmetrics metrics before a repeated row.
        self._before_repeated: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Reduce what was logged in training."""
        self._reduce(trainer)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Let a repeated row count nothing in what is logged and in torchmetrics metrics."""
        self.on_validation_epoch_end(trainer, pl_module)
        if is_repeated(trainer.val_dataloaders, batch_idx, dataloader_idx):
            self._before_repeated = rank_part.metric_states(pl_module)
            trainer._results.update_metrics = functools.partial(_count_nothing, trainer._results)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Undo what a repeated row counted in metrics: after the last batch Lightning computes what was logged."""
        rank_part.set_metric_states(pl_module, self._before_repeated)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Undo what a repeated row counted in the module's own ``on_validation_batch_end``, which comes after ours."""
        rank_part.set_metric_states(pl_module, self._before_repeated)
        self._before_repeated = {}
        vars(trainer._results).pop("update_metrics", None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Reduce what was logged in validation."""
        self._reduce(trainer)
        _ = trainer.callback_metrics  # takes the numbers up, also where no callback reads them

    def _reduce(self, trainer: Any) -> None:
        """Reduce each number of the epoch that every rank has logged alone, as its ``reduce_fx`` says."""
        results = trainer._results
        if self._hvd.size() == 1 or results is None:
            return
        own = {key: result for key, result in results.items() if _is_own(result)}
        by_rank = self._hvd.allgather_object(sorted(own), name="hvd_cluster.logged")
        for key in sorted(set(by_rank[0]).intersection(*by_rank)):
            result = own[key]
            result.meta.sync.should, result._computed = True, None
            result.compute()  # Lightning keeps the number until more is logged
            result.meta.sync.should = False


def _count_nothing(results: Any, key: str, value: Any, batch_size: int) -> None:
    """Take a logged number without adding it to the epoch's: every rank must know the name when they reduce."""
    result = results[key]
    before = {name: getattr(result, name) for name in result._defaults}
    type(results).update_metrics(results, key, value, batch_size)
    if result.meta.on_epoch:
        for name, state in before.items():
            setattr(result, name, state)


def _is_own(result: Any) -> bool:
    """Whether a logged number of an epoch is that of one rank: metrics of torchmetrics are of all."""
    sync = result.meta.sync
    return result.is_tensor and result.meta.on_epoch and not (sync.should or sync.rank_zero_only or result.has_reset)


def parted(logged: dict[str, float]) -> dict[str, dict[str, Any]]:
    """What a module logged, as the "train" and the "validation" part of a record.

    Names that begin with ``val`` are of the validation; ``train_``, ``val_`` and ``validation_`` are left out.
    """
    parts: dict[str, dict[str, Any]] = {"train": {"all_metrics": [{}]}, "validation": {"all_metrics": [{}]}}
    for name, value in logged.items():
        prefix, found, rest = name.replace("/", "_").partition("_")
        part = "validation" if prefix in ("val", "valid", "validation") else "train"
        short = rest if found and prefix in ("train", "val", "valid", "validation") else name
        if short == "loss":
            parts[part]["loss"] = value
        else:
            parts[part]["all_metrics"][0][short] = value
    return parts
