"""The callbacks of this package in a Keras fit. Importing this needs Keras."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from hvd_cluster.estimators.keras import rank_state
from hvd_cluster.estimators.keras.best_file import KerasBestFile
from hvd_cluster.estimators.keras.callback_states import CallbackStates
from hvd_cluster.estimators.keras.data import as_taken
from hvd_cluster.estimators.keras.logs import means, over_all_rows, part, spread, values
from hvd_cluster.estimators.keras.spec import KerasSpec
from hvd_cluster.estimators.keras.state import (
    apply_pending_gradients,
    as_tensors,
    capture,
    contents,
    has_pending_gradients,
    named_weights,
    weights_of,
)
from hvd_cluster.estimators.run.checkpoint import PartialEpoch
from hvd_cluster.estimators.run.finite_check import FiniteCheck
from hvd_cluster.estimators.run.readers import Readers, rows_of
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.keras.callbacks import BroadcastGlobalVariablesCallback
from hvd_cluster.keras.values import broadcast_variables
from hvd_cluster.monitor.step_clock import SAVE, step_clock


@dataclass
class FitProgress:
    """What the callbacks share."""

    run: WorkerRun[KerasSpec]
    readers: Readers
    #: By what the learning rate of one worker is multiplied.
    rate_factor: float
    #: Of the user's callbacks.
    states: CallbackStates
    losses: FiniteCheck
    #: On rank 0, if the user wants the best epoch.
    best: KerasBestFile | None = None
    #: Steps of the current epoch that an earlier start of the run has made.
    done: int = 0
    #: What this rank held after them; None if the number of ranks was another.
    rank_state: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Continue an interrupted epoch.

        Its numbers are those of its remaining steps if the number of ranks has changed: metrics cannot be divided among
        other ranks, and other random numbers are drawn.
        """
        partial = self.run.partial_epoch
        if partial is not None:
            rank, size = self.run.hvd.rank(), self.run.hvd.size()
            # If ``train_steps_per_epoch`` is given, no steps may be left; Keras makes at least one.
            self.done = min(partial.steps(self.run.spec, size), self.steps - 1)
            self.rank_state = partial.rank_state(rank, size)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.readers.train_steps


class StartEqual(BroadcastGlobalVariablesCallback):
    """Callback that gives all ranks rank 0's variables.

    It leaves out weights that each rank has made with the user's factory.
    """

    def __init__(self, run: WorkerRun[KerasSpec]) -> None:
        super().__init__(0)
        self._run = run

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast before the first batch: callbacks may have changed rank 0's weights."""
        made, hvd = self._run.spec.model.made, self._run.hvd
        if made is not None and not self.broadcast_done:
            weights = named_weights(self.model)
            equal: set[str] = set()
            if hvd.rank() == 0:
                now = contents(self.model, made_state.equal_names(made))
                equal = now.keys() - made_state.changed_names(now, made)
            for name in hvd.broadcast_object(equal, root_rank=0, name="hvd_cluster.keras.equal"):
                self.register_local_var(weights[name])
        super().on_train_batch_begin(batch, logs)


class GlobalEpochNumbers(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """The first callback: others see the same numbers of an epoch on all ranks.

    These include the numbers of the validation.
    """

    def __init__(self, progress: FitProgress) -> None:
        super().__init__()
        self._progress = progress
        self._run = progress.run
        #: The first batch of the steps that Keras executes at once.
        self._first = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._run.start_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Seed the rank before an epoch's first step: a resumed run then draws the same.

        Not earlier: what Keras draws to make its iterator, at the beginning of a fit, is not a part of an epoch.
        """
        progress, run = self._progress, self._run
        self._first = batch
        if batch > progress.done:
            return
        rank_state.seed(self.model, run.spec.seed, run.epoch, run.hvd.rank())
        if progress.rank_state is not None:
            rank_state.restore(self.model, progress.rank_state)
            progress.rank_state = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        progress, run = self._progress, self._run
        # If Keras executes several steps at once, ``batch`` is the last of them.
        run.timer.rows = (batch + 1 - progress.done) * run.spec.batch_size
        # Keras gives the mean of the epoch so far. With a scaled loss, an infinite one would stay in it.
        if "loss" in (logs or {}) and not isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer):
            progress.losses.add(batch, logs["loss"], self._first)
        if progress.losses.is_due(batch + 1):
            progress.losses.check(run.epoch)
        if run.reports.is_due(last=batch + 1 == progress.steps):
            numbers = spread(logs)
            run.report_step(batch, progress.steps, numbers.pop("loss", float("nan")), numbers)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the numbers over the ranks, and validate rank 0's model."""
        logs = {} if logs is None else logs
        model, progress, run = self.model, self._progress, self._run
        apply_pending_gradients(model)
        _share_buffers(model)
        progress.losses.check(run.epoch, lambda: _has_finite_weights(model))
        own = over_all_rows(model, run.hvd, values(logs))
        logs.update(means([(1, numbers) for numbers in self._gathered(own)]))
        if run.spec.has_validation:
            rows, own = self._validated()
            found = means(self._gathered((rows, over_all_rows(model, run.hvd, own))))
            logs.update({f"val_{name}": value for name, value in found.items()})
        if progress.best is not None:
            progress.best.restore_value()

    def _gathered(self, own: Any) -> list[Any]:
        return self._run.hvd.allgather_object(own, name="hvd_cluster.keras.logs")

    def _validated(self) -> tuple[int, dict[str, Any]]:
        """Rows of this rank, and the loss and the metrics over them.

        A rank without rows left makes the other ranks' steps too, in which a metric may wait for it, with a row that
        does not count.
        """
        rows, batches = 0, self._run.validated(self._progress.readers.validation_batches())
        repeated: list[Any] = []
        spec, columns = self._run.spec, self._run.spec.columns

        def items() -> Any:
            nonlocal rows
            for batch in batches:
                if not rows_of(batch):
                    repeated.append(batch)
                    return
                rows += rows_of(batch)
                yield columns.item(batch)

        # Keras warns of an iterator that ends unless it knows the number of steps.
        steps = self._progress.readers.num_validated
        own, numbers = itertools.islice(items(), steps), {}
        first = next(own, None)
        if first is None:
            self.model.reset_metrics()
        else:
            data = as_taken(spec.model.backend, first, own, spec.prefetch)
            numbers = self.model.evaluate(data, steps=steps, verbose=0, return_dict=True)
        metrics = as_tensors(self.model.metrics_variables)
        for batch in itertools.chain(repeated, batches):
            self.model.test_on_batch(*columns.item(batch))
            rank_state.assign(self.model.metrics_variables, metrics)
        return rows, values(numbers)


class StopOnAllRanks(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Callback after the user's: if one stops the fit on one rank, all ranks stop.

    Otherwise the other ranks would wait for that rank in the next step. The ranks ask each other after each epoch, and
    after each step only if the user has a callback that may stop the fit there.

    Args:
        callbacks: the user's, the same on all ranks.
        hvd: ``hvd_cluster.torch``.
    """

    #: Where a callback may set ``model.stop_training`` so that Keras ends the fit within an epoch.
    _HOOKS = (
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_batch_begin",
        "on_batch_end",
    )
    #: Keras's own that stop a fit there, or call the user's code; the others of Keras and of this package do not.
    _STOPPING = (keras.callbacks.TerminateOnNaN, keras.callbacks.LambdaCallback)

    def __init__(self, callbacks: Sequence[Any], hvd: Collectives) -> None:
        super().__init__()
        self._hvd = hvd
        self._asks_after_steps = any(self._may_stop_within_epoch(callback) for callback in callbacks)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._asks_after_steps:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree()

    def _agree(self) -> None:
        if self._hvd.size() > 1:
            own = torch.tensor([int(self.model.stop_training)])
            stops = self._hvd.allreduce(own, op=self._hvd.Max, name="hvd_cluster.keras.stop")
            self.model.stop_training = bool(stops.item())

    def _may_stop_within_epoch(self, callback: Any) -> bool:
        if isinstance(callback, self._STOPPING):
            return True
        if type(callback).__module__.startswith(("keras.", "hvd_cluster.")):
            return False
        return any(
            getattr(getattr(callback, name), "__func__", None) is not getattr(keras.callbacks.Callback, name)
            for name in self._HOOKS
        )


class SaveRun(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Last callback: completes the epoch's record, saves the run as others left it."""

    def __init__(self, progress: FitProgress, log: Any = None) -> None:
        super().__init__()
        self._progress = progress
        self._run = progress.run
        self._log = log
        #: The first batch of the steps that Keras executes at once.
        self._first = 0
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the user's callbacks, which have reset their states."""
        self._progress.states.restore()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save within the epoch if that is due; every rank takes part."""
        run, steps, done = self._run, self._progress.steps, batch + 1
        # If Keras executes several steps at once, what is due among them is saved after them, or after the group of
        # passes in which they end.
        made = range(self._first + 1, done + 1)
        self._is_due = (self._is_due or any(run.is_checkpoint_due_within(step, steps) for step in made)) and (
            done < steps
        )
        if not self._is_due:
            return
        model = self.model
        # A run that is about to be stopped is saved at the end of its epoch.
        if model.stop_training or has_pending_gradients(model, run.spec.backward_passes_per_step):
            return
        self._is_due = False
        _share_buffers(model)
        self._progress.losses.check(run.epoch, lambda: _has_finite_weights(model))
        self._save(run.partial(done, rank_state.capture(model)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        run, best = self._run, self._progress.best
        logged = spread(logs)
        validation = {name[4:]: value for name, value in logged.items() if name.startswith("val_")}
        record = {
            **run.record(),
            "train": part({name: value for name, value in logged.items() if not name.startswith("val_")}),
            **({"validation": part(validation)} if validation else {}),
            "logged": logged,
            **run.left_out_rows(),
        }
        run.history.append(record)
        if best is not None:
            best.save(best.path)
        is_stopped = bool(self.model.stop_training)
        if run.is_checkpoint_due(is_last=is_stopped or run.epoch == run.spec.epochs):
            self._save(is_stopped=is_stopped)
        run.reports.epoch(record)
        if self._log is not None:
            self._log(record)

    @step_clock.span(SAVE)
    def _save(self, partial_epoch: PartialEpoch | None = None, is_stopped: bool = False) -> None:
        """Save the run, on rank 0."""
        if self._run.hvd.rank() == 0:
            callbacks = self._progress.states.capture()
            state = {
                **capture(self.model, self._progress.rate_factor, self._progress.run.spec.model.made),
                "callbacks": callbacks,
            }
            self._run.checkpoint(state, partial_epoch, is_stopped).save(self._run.files)


class ResumedCallbackList(keras.callbacks.CallbackList):  # type: ignore[misc,unused-ignore]
    """Callback list with correct batch indices even if the fit starts in mid-epoch.

    Keras always counts from 0, and makes as many steps in this epoch as in the others. So the indices are shifted here,
    and the epoch is ended early by ``stop_training``, which is reset at once.
    """

    def __init__(self, callbacks: Sequence[Any], progress: FitProgress, model: Any) -> None:
        self._progress = progress
        #: After the epoch has been ended here: whether a callback has stopped the fit.
        self._is_stopped: bool | None = None
        super().__init__(
            callbacks, add_history=True, model=model, verbose=0, epochs=progress.run.spec.epochs, steps=progress.steps
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks.

        What they do to variables at the start of an interrupted epoch is in the checkpoint.
        """
        run, model = self._progress.run, self.model
        partial, run.partial_epoch = run.partial_epoch, None
        variables = [] if partial is None else [*weights_of(model), *model.optimizer.variables]
        kept = as_tensors(variables)
        super().on_epoch_begin(epoch, logs)
        rank_state.assign(variables, kept)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(self._progress.done + batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End an epoch in which the fit started."""
        batch += self._progress.done
        super().on_train_batch_end(batch, logs)
        if self._progress.done and batch + 1 >= self._progress.steps:
            model = self.model
            self._is_stopped, model.stop_training = model.stop_training, True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._is_stopped is not None:
            self.model.stop_training, self._is_stopped = self._is_stopped, None
        super().on_epoch_end(epoch, logs)
        self._progress.done = 0


def _has_finite_weights(model: Any) -> bool:
    floating = (weight for weight in model.trainable_weights if keras.backend.is_float_dtype(weight.dtype))
    return all(bool(keras.ops.all(keras.ops.isfinite(weight))) for weight in floating)


def _share_buffers(model: Any) -> None:
    """Give all ranks rank 0's variables that layers change, not frozen parameters.

    Running means are such variables. Rank 0's model is the one that is validated, saved and returned.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    # Keras keeps apart what a layer made to be trained, also when it is frozen.
    parameters = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
    broadcast_variables([one for one in model.non_trainable_weights if id(one) not in parameters], root_rank=0)
