"""Callbacks of this package in a Lightning fit. Importing this needs Lightning."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.estimators.lightning import rank_state
from hvd_cluster.estimators.lightning.best_file import LightningBestFile
from hvd_cluster.estimators.lightning.epoch_numbers import EpochNumbers, parted
from hvd_cluster.estimators.lightning.estimator_strategy import EstimatorStrategy
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.lightning.structure_check import StructureCheck
from hvd_cluster.estimators.run import random_state
from hvd_cluster.estimators.run.best_file import file_tensor
from hvd_cluster.estimators.run.checkpoint import PartialEpoch
from hvd_cluster.estimators.run.finite_check import FiniteCheck, FiniteWeights
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.arguments import floating_dtype
from hvd_cluster.estimators.torch.means import Means
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.estimators.view.history import flat
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.lightning.optimizers import scale_rates
from hvd_cluster.monitor.step_clock import SAVE, step_clock
from hvd_cluster.torch.functions import share_buffers

_callbacks: Any = submodule("callbacks")

#: Key of the ``accumulate_grad_batches`` that a callback or the module has set, in what a rank holds of an epoch.
_PASSES = "accumulate_grad_batches"


class SaveRun(_callbacks.Checkpoint):
    """Reports and records a fit's epochs, and saves the run after and within them.

    A ``Checkpoint`` for Lightning, so that it comes last of all callbacks and saves their states too.

    Args:
        run: on this worker.
        best: the file of its best epoch.
        check: how the fitted module is returned.
    """

    def __init__(self, run: WorkerRun[LightningSpec], best: LightningBestFile, check: StructureCheck) -> None:
        super().__init__()
        self.run = run
        self.check = check
        #: Batches of the current epoch that an earlier start of the run has made.
        self.done = 0
        #: :meth:`Readers.not_finite`; None for the loaders of a LightningDataModule.
        self.look: Callable[[int, int], str | None] | None = None
        #: The dtypes in which the user's module got its features in the first training step, if that called it.
        self.dtypes: list[str] = [] if run.resumed is None else list(run.resumed.state.get("dtypes", []))
        self._recording = contextlib.ExitStack()
        self._spec = run.spec
        self._hvd = run.hvd
        self._best = best
        self._means = Means([], torch.device("cpu"))
        self._has_loss = False
        self._numbers = EpochNumbers()
        #: The Trainer's ``accumulate_grad_batches`` before the first epoch of this start of the run.
        self._given_passes = 1
        self._trainer: Any = None
        self._losses = FiniteCheck(False, run.hvd, run.spec.run_id)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adapt the checkpoint's folder to this worker, its learning rates to the ranks."""
        self._best.restore_callbacks(trainer, checkpoint)
        found = self.run.resumed
        if found is not None and getattr(trainer.strategy, "scale_lr", False):
            groups = [group for state in checkpoint["optimizer_states"] for group in state["param_groups"]]
            scale_rates(groups, checkpoint["lr_schedulers"], self._hvd.size() / found.size)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Prepare to continue an epoch: Lightning alone would skip hooks of its start."""
        self._trainer, self._given_passes = trainer, trainer.accumulate_grad_batches
        self._has_finite_weights = FiniteWeights(pl_module)
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._losses = FiniteCheck(self._spec.terminate_on_nan, self._hvd, self._spec.run_id, has_scaler, self.look)
        if self.run.partial_epoch is not None:
            # If ``train_steps_per_epoch`` is given, a smaller number of ranks may have no steps left.
            steps = self.run.partial_epoch.steps(self._spec, self._hvd.size())
            # Another number of ranks begins with a group of batches too.
            steps -= steps % (_changed_passes(self.run.partial_epoch) or 1)
            self.done = min(steps, trainer.num_training_batches - 1)
            trainer.fit_loop.restarting = False
            trainer.fit_loop.epoch_loop.restarting = False
            self._begin(pl_module)  # Lightning may skip the next hook

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Seed the rank, so that a resumed run draws what an undisturbed one draws."""
        self._begin(pl_module)

    def _begin(self, pl_module: Any) -> None:
        random_state.seed_all(self._spec.seed, self.run.epoch, self._hvd.rank())
        self.run.start_epoch()
        self._means = Means([], pl_module.device)
        self._has_loss = False
        self._numbers.begin()

    def before_first_batch(self) -> None:
        """Continue the epoch if it was interrupted.

        Another number of ranks draws other random numbers, may use the remaining rows in another order (see
        :meth:`PartialEpoch.steps`), and records the numbers of the remaining steps only.
        """
        partial, self.run.partial_epoch = self.run.partial_epoch, None
        if partial is None:
            return
        loop = self._trainer.fit_loop
        batches = loop.epoch_loop.batch_progress.current
        batches.ready = batches.started = batches.processed = batches.completed = self.done
        loop._data_fetcher.fetched = self.done
        if (passes := _changed_passes(partial)) is not None:
            self._trainer.accumulate_grad_batches = passes
        own = partial.rank_state(self._hvd.rank(), self._hvd.size())
        if own is not None:
            self._means.restore(own["means"])
            self._has_loss = own["has_loss"]
            self._numbers.restore(own.get("numbers", self._numbers.state()))
            self.run.timer.validation_left_out_rows = own.get("validation_left_out_rows", 0)
            rank_state.restore(own["lightning"], self._trainer, self._trainer.lightning_module)

    def between_batches(self) -> None:
        """Save the run within the epoch if that is due; every rank takes part."""
        trainer = self._trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        done = batches.completed
        if batches.ready != done or done % trainer.accumulate_grad_batches:
            return  # in the middle of a step
        if self.run.is_checkpoint_due_within(done, trainer.num_training_batches):
            self._losses.check(self.run.epoch, self._has_finite_weights)
            self._save(trainer, done)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Look at what the first step of an epoch calls the module with."""
        if self._spec.objective is None and batch_idx == 0 and not self.dtypes:
            self._recording.enter_context(recorded_dtypes(pl_module, self._spec, self.dtypes))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._recording.close()
        run, steps = self.run, int(trainer.num_training_batches)
        rows = len(next(iter(batch.values()))) if isinstance(batch, Mapping) else self._spec.batch_size
        run.timer.rows += rows
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._has_loss = True
            if pl_module.automatic_optimization:  # Lightning divides it
                loss = loss * trainer.accumulate_grad_batches
            self._means.add(loss, [], rows)
            self._losses.add(batch_idx, loss)
        if self._losses.is_due(batch_idx + 1):
            self._losses.check(run.epoch)
        if run.reports.is_due(last=batch_idx + 1 == steps):
            run.report_step(batch_idx, steps, loss if isinstance(loss, torch.Tensor) else math.nan, {})

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Make the gradients of an epoch's last group of batches their mean.

        They are a mean even if the group is short. Lightning divides each loss by ``accumulate_grad_batches``. Clipping
        comes after this.
        """
        batches = trainer.accumulate_grad_batches
        made = trainer.fit_loop.epoch_loop.batch_progress.current.ready % batches
        if made and pl_module.automatic_optimization:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(batches / made)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note what the validation has logged, before Lightning resets it."""
        self._numbers.add(trainer._results)
        self._numbers.is_validated = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the epoch, and save the run."""
        run = self.run
        self._losses.check(run.epoch, self._has_finite_weights)
        record = run.record()
        self._numbers.add(trainer._results)
        logged, is_validated = self._numbers.of_epoch(trainer.callback_metrics), self._numbers.is_validated
        parts = parted(logged)
        means = self._means.over_ranks(self._hvd, "hvd_cluster.train_means")
        if self._has_loss and "loss" not in parts["train"]:
            parts["train"]["loss"] = means["loss"]
        record |= {"train": parts["train"], "logged": logged, **run.left_out_rows(is_validated)}
        if self._spec.has_validation and (is_validated or flat(parts["validation"])):
            record["validation"] = parts["validation"]
        run.history.append(record)
        self.done = 0
        if run.is_checkpoint_due(is_last=self._is_stopped(trainer) or run.epoch == self._spec.epochs):
            self._save(trainer)
        run.reports.epoch(record)

    @staticmethod
    def _is_stopped(trainer: Any) -> bool:
        """Whether a callback ends the fit here; Lightning continues to ``min_epochs``."""
        return bool(trainer.should_stop) and getattr(trainer.fit_loop, "_can_stop_early", True)

    @step_clock.span(SAVE)
    def _save(self, trainer: Any, done: int | None = None) -> None:
        """Save after an epoch, or after ``done`` batches of one; every rank takes part."""
        module, strategy = trainer.lightning_module, trainer.strategy
        in_shards = self._spec.saves_shards
        if in_shards:
            strategy.equalize()
        share_buffers(module, root_rank=0)  # rank 0's model is the one that is saved and returned
        written = strategy.in_shards() if in_shards else contextlib.nullcontext()
        with scratch_folder("ckpt") as folder, written as shards:
            path = Path(folder) / "epoch.ckpt"
            trainer.save_checkpoint(path)  # every rank takes part, and rank 0 writes
            partial = None
            if done is not None:
                self._numbers.add(trainer.fit_loop.epoch_loop._results)
                passes = trainer.accumulate_grad_batches
                own = {
                    _PASSES: passes if passes != self._given_passes else None,
                    "means": self._means.sums,
                    "has_loss": self._has_loss,
                    "numbers": self._numbers.state(),
                    "validation_left_out_rows": self.run.timer.validation_left_out_rows,
                    "lightning": rank_state.capture(trainer, module),
                }
                partial = self.run.partial(done, own)
            if self._hvd.rank() == 0:
                self._best.save_decisive(trainer)
                state: dict[str, Any] = {"lightning": file_tensor(path), "dtypes": self.dtypes}
                if isinstance(self._spec.model, ModelSource):
                    state["made"] = dict(self._spec.model.made)
                if in_shards:
                    state["shards"] = shards
                self.run.checkpoint(state, partial, self._is_stopped(trainer)).save(self.run.files)
                if in_shards:
                    strategy.folders.keep(shards)
                    strategy.folders.delete_others()


@contextlib.contextmanager
def recorded_dtypes(module: torch.nn.Module, spec: LightningSpec, dtypes: list[str]) -> Iterator[None]:
    """Add the features' dtypes in the block's first call of module or ``forward``."""
    forward, before = module.forward, {name: value for name, value in vars(module).items() if name == "forward"}

    def restore() -> None:
        vars(module).pop("forward", None)
        vars(module).update(before)

    @functools.wraps(forward)
    def recording(*args: Any, **kwargs: Any) -> Any:
        restore()
        with contextlib.suppress(TypeError, ValueError):  # no such signature, which forward() itself may report
            dtypes.extend(_dtypes_of(module, spec, inspect.signature(forward).bind(*args, **kwargs)))
        return forward(*args, **kwargs)

    vars(module)["forward"] = recording
    try:
        yield
    finally:
        restore()


def _dtypes_of(module: torch.nn.Module, spec: LightningSpec, call: inspect.BoundArguments) -> list[str]:
    """The dtypes of a call's features in the model that scores.

    The list is empty if the call has other arguments than features.
    """
    names, by_name = spec.inputs.arguments, {**call.arguments, **call.kwargs}
    given = [by_name.get(name) for name in names] if spec.inputs.by_keyword else call.args[: len(names)]
    found = [one.dtype for one in given if isinstance(one, torch.Tensor)]
    if len(found) < len(names):
        return []
    floating: torch.dtype = getattr(torch, spec.floating_dtype)
    own = getattr(torch, floating_dtype(module))  # the Trainer's precision may have changed it
    for index, dtype in enumerate(found):
        if dtype.is_floating_point:
            found[index] = floating if dtype == own else torch.promote_types(dtype, floating)
    return [str(dtype).removeprefix("torch.") for dtype in found]


class ReduceLogged(_callbacks.Callback):
    """Gives callbacks the numbers of all ranks, even without ``sync_dist``.

    It comes first of the callbacks. It does not reduce what the module's own ``on_train_epoch_end`` logs, which comes
    later.

    Args:
        hvd: the world of the run.
    """

    def __init__(self, hvd: Collectives) -> None:
        super().__init__()
        self._hvd = hvd
        #: The states of the module's torchmetrics metrics before a repeated row.
        self._before_repeated: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Reduce what was logged in training; callbacks see the weights of all ranks too."""
        if isinstance(trainer.strategy, EstimatorStrategy):
            trainer.strategy.equalize()
        self._reduce(trainer)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Exclude a repeated row from what is logged and from torchmetrics metrics."""
        self.on_validation_epoch_end(trainer, pl_module)
        if _is_repeated(trainer.val_dataloaders, batch_idx, dataloader_idx):
            self._before_repeated = rank_state.metric_states(pl_module)
            trainer._results.update_metrics = functools.partial(_log_without_value, trainer._results)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Restore metrics after a repeated row, before Lightning computes them."""
        rank_state.set_metric_states(pl_module, self._before_repeated)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore metrics: the module's ``on_validation_batch_end`` comes after ours."""
        rank_state.set_metric_states(pl_module, self._before_repeated)
        self._before_repeated = {}
        vars(trainer._results).pop("update_metrics", None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Reduce what was logged in validation."""
        self._reduce(trainer)
        _ = trainer.callback_metrics  # collects the numbers, even if no callback reads them

    def _reduce(self, trainer: Any) -> None:
        """Reduce numbers that all ranks logged without ``sync_dist``, by ``reduce_fx``."""
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


def _is_repeated(loaders: Any, batch_idx: int, dataloader_idx: int) -> bool:
    """Whether a validation batch of a Trainer is a repeated row.

    Args:
        loaders: ``Trainer.val_dataloaders``: a loader, or a collection of loaders.
        batch_idx: the index of the batch in its loader.
        dataloader_idx: the index of the loader in a collection.
    """
    listed = [*loaders.values()] if isinstance(loaders, Mapping) else loaders
    loader = listed[dataloader_idx] if isinstance(listed, (list, tuple)) else listed
    first: int | None = getattr(loader, "first_repeated", None)
    return first is not None and batch_idx >= first


def _log_without_value(results: Any, key: str, value: Any, batch_size: int) -> None:
    """Log the name of a number only, as all ranks must know it when they reduce."""
    result = results[key]
    before = {name: getattr(result, name) for name in result._defaults}
    type(results).update_metrics(results, key, value, batch_size)
    if result.meta.on_epoch:
        for name, state in before.items():
            setattr(result, name, state)


def _changed_passes(partial: PartialEpoch) -> int | None:
    """The ``accumulate_grad_batches`` of an interrupted epoch, equal on all ranks.

    It is None if the epoch has those given to the fit.
    """
    passes: int | None = partial.ranks[0].get(_PASSES)
    return passes


def _is_own(result: Any) -> bool:
    """Whether a logged number is one rank's; those of torchmetrics are all ranks'."""
    sync = result.meta.sync
    return result.is_tensor and result.meta.on_epoch and not (sync.should or sync.rank_zero_only or result.has_reset)
