"""What watches a Lightning fit on a worker: records, reports and checkpoints. Importing this needs Lightning."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hvd_cluster.estimators.lightning.best_file import BestFile
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.snapshot import Snapshot
from hvd_cluster.estimators.run.watch import Watch
from hvd_cluster.estimators.torch import random_state
from hvd_cluster.estimators.torch.means import Means
from hvd_cluster.lightning.installed import submodule

_callbacks: Any = submodule("callbacks")


class Epochs(_callbacks.Checkpoint):
    """Keeps the history of a fit, reports it, and saves the run after each epoch.

    A ``Checkpoint`` in Lightning's eyes, so that it comes last of all callbacks: what they keep is saved too.
    """

    def __init__(self, spec: LightningSpec, hvd: Any, best: BestFile, history: list[dict[str, Any]]) -> None:
        super().__init__()
        self.history = history
        #: Of the epoch that goes on.
        self.watch = Watch()
        #: Rows that an epoch goes through a second time; whoever makes the batches knows.
        self.padding_rows = 0
        self._spec = spec
        self._hvd = hvd
        self._best = best
        self._reports = Reports(spec, hvd.rank())
        self._trained_on = Fingerprint.of(spec.dataset, spec.inputs)
        self._means = Means([], torch.device("cpu"))
        self._has_loss = False

    @property
    def epoch(self) -> int:
        """The number of the epoch that goes on."""
        return len(self.history)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The run goes on in another folder, perhaps."""
        self._best.bring_back(trainer, checkpoint)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Seed the rank, so that a resumed run draws what an undisturbed one draws."""
        random_state.seed_all(self._spec.seed, self.epoch, self._hvd.rank())
        self.watch = Watch()
        self._means = Means([], pl_module.device)
        self._has_loss = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the loss up, and report now and then."""
        watch, steps = self.watch, int(trainer.num_training_batches)
        rows = len(next(iter(batch.values()))) if isinstance(batch, Mapping) else self._spec.batch_size
        watch.rows += rows
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._has_loss = True
            if pl_module.automatic_optimization:  # Lightning divides it
                loss = loss * trainer.accumulate_grad_batches
            self._means.add(loss, [], rows)
        if self._reports.is_due(last=batch_idx + 1 == steps):
            self._reports.step(
                epoch=self.epoch,
                epochs=self._spec.epochs,
                step=batch_idx + 1,
                steps=steps,
                loss=float(loss) if isinstance(loss, torch.Tensor) else math.nan,
                samples_per_s=watch.rows_per_s * self._hvd.size(),
                data_wait_share=watch.wait_share,
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the record of the epoch, and save the run."""
        watch = self.watch
        speeds = torch.tensor([[watch.rows_per_s, watch.wait_share]], dtype=torch.float64)
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
            "seconds": watch.seconds,
            "padding_rows": self.padding_rows,
            "logged": logged,
        }
        if self._spec.validation_is_there:
            record["validation"] = parts["validation"]
        self.history.append(record)
        if len(self.history) % self._spec.checkpoint_every_epochs == 0 or self._is_last(trainer):
            self._save(trainer)
        self._reports.epoch(record)

    def _is_last(self, trainer: Any) -> bool:
        return self._is_stopped(trainer) or len(self.history) == self._spec.epochs

    @staticmethod
    def _is_stopped(trainer: Any) -> bool:
        """Whether a callback ends the fit here; with ``min_epochs`` it may have asked for it too early."""
        return bool(trainer.should_stop) and getattr(trainer.fit_loop, "_can_stop_early", True)

    def _save(self, trainer: Any) -> None:
        files = RunFiles.of(self._spec)
        if not files.are_kept:
            return
        with tempfile.TemporaryDirectory(prefix="hvd-ckpt-") as folder:
            path = Path(folder) / "epoch.ckpt"
            trainer.save_checkpoint(path)  # every rank takes part, and rank 0 writes
            if self._hvd.rank() == 0:
                stopped_of = self._spec.epochs if self._is_stopped(trainer) else None
                body, size = path.read_bytes(), self._hvd.size()
                self._best.keep(trainer)
                files.save(Snapshot(body, self.history, size, self._trained_on, stopped_of).to_bytes())


class TerminateOnNaN(_callbacks.Callback):
    """Ends the fit when the loss is not a finite number."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at the loss.

        Raises:
            ValueError: it is NaN or infinite.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and not torch.isfinite(loss).all():
            raise ValueError(
                f"the loss is {float(loss)} in step {batch_idx} of epoch {trainer.current_epoch}, and terminate_on_nan "
                "is set: lower the learning rate, or look for extreme values in the data"
            )


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
