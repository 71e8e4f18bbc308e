"""What watches a Keras fit on a worker. Importing this needs Keras."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import keras

from hvd_cluster.estimators.keras import rank_state
from hvd_cluster.estimators.keras.best_file import BestFile
from hvd_cluster.estimators.keras.callback_states import CallbackStates
from hvd_cluster.estimators.keras.data import KerasBatches, as_taken
from hvd_cluster.estimators.keras.logs import means, over_all_rows, part, spread, values
from hvd_cluster.estimators.keras.spec import KerasSpec
from hvd_cluster.estimators.keras.state import capture, complete_passes, is_amid_passes
from hvd_cluster.estimators.run.epoch_timer import EpochTimer
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.finite_check import FiniteCheck
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.schedule import is_due_within
from hvd_cluster.estimators.run.snapshot import Running, Snapshot
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.keras.values import broadcast_variables


@dataclass
class FitProgress:
    """How far a fit has come."""

    spec: KerasSpec
    #: ``hvd_cluster.torch``.
    hvd: Collectives
    batches: KerasBatches
    history: list[dict[str, Any]]
    #: By what the learning rate of one worker is multiplied.
    rate_factor: float
    #: Of the user's callbacks.
    states: CallbackStates
    #: One for all callbacks: each would write a file of its own over the other's.
    reports: Reports
    losses: FiniteCheck
    timer: EpochTimer = field(default_factory=EpochTimer)
    #: The best epoch's file, on rank 0; None where none is wanted.
    best: BestFile | None = None
    #: Steps of the running epoch that were made before this fit.
    done: int = 0
    #: What this rank held after them; None where another number of ranks made them.
    rank_state: bytes | None = None

    def go_on(self, running: Running) -> None:
        """Begin amid an epoch.

        Another number of ranks draws other random numbers, and may go through the rest in another order: see
        :func:`hvd_cluster.estimators.run.schedule.steps_of_rows`. The epoch's numbers are those of the rest: metrics of
        any kind cannot be divided among other ranks.
        """
        rank, size = self.hvd.rank(), self.hvd.size()
        # With so many steps an epoch, it may have had its rows already; Keras makes at least one.
        self.done = min(running.steps(self.spec, size), self.batches.readers.train_steps - 1)
        self.rank_state = running.of(rank, size)


class BeforeOthers(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Comes first: what the other callbacks see of an epoch is the same on all ranks, validation included."""

    def __init__(self, progress: FitProgress) -> None:
        super().__init__()
        self._progress = progress

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to measure."""
        self._progress.timer = self._progress.batches.timer = EpochTimer()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Seed the rank in each epoch, so that a resumed run draws what an undisturbed one draws.

        Not before: what Keras draws when it makes its iterator, at the beginning of a fit, is no part of an epoch.
        """
        progress = self._progress
        if batch > progress.done:
            return
        rank_state.seed(self.model, progress.spec.seed, len(progress.history), progress.hvd.rank())
        if progress.rank_state is not None:
            rank_state.restore(self.model, progress.rank_state)
            progress.rank_state = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report now and then."""
        progress, spec = self._progress, self._progress.spec
        steps = progress.batches.readers.train_steps
        # Several steps may be executed at once, and then ``batch`` is the last of them.
        progress.timer.rows = (batch + 1 - progress.done) * spec.batch_size
        # Keras gives the mean of the epoch so far: with a scaled loss, one that is infinite stays in it.
        if "loss" in (logs or {}) and not isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer):
            progress.losses.add(batch, logs["loss"])
        if progress.losses.is_due(batch + 1):
            progress.losses.check(len(progress.history))
        if self._progress.reports.is_due(last=batch + 1 == steps):
            numbers = spread(logs)
            self._progress.reports.step(
                epoch=len(progress.history),
                epochs=spec.epochs,
                step=batch + 1,
                steps=steps,
                loss=numbers.pop("loss", float("nan")),
                metrics=numbers,
                samples_per_s=progress.timer.rows_per_s * progress.hvd.size(),
                data_wait_share=progress.batches.timer.wait_share,
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Make the last step, if its group of passes is short; average the numbers, and validate rank 0's model."""
        logs = {} if logs is None else logs
        model, progress = self.model, self._progress
        complete_passes(model)
        _share_buffers(model)
        progress.losses.check(len(progress.history), lambda: _has_finite_weights(model))
        own = over_all_rows(model, progress.hvd, values(logs))
        logs.update(means([(1, numbers) for numbers in self._gathered(own)]))
        if progress.spec.validation_is_there:
            rows, own = self._validated()
            found = means(self._gathered((rows, over_all_rows(model, progress.hvd, own))))
            logs.update({f"val_{name}": value for name, value in found.items()})
        if progress.best is not None:
            progress.best.take_up()

    def _gathered(self, mine: Any) -> list[Any]:
        return self._progress.hvd.allgather_object(mine, name="hvd_cluster.keras.logs")

    def _validated(self) -> tuple[int, dict[str, Any]]:
        """Rows of this rank, and the loss and the metrics over them.

        Where its rows have ended, it makes the other ranks' steps, in which a metric may wait for it, with a row that
        counts nothing.
        """
        rows, given = 0, self._progress.batches.validation()
        repeated: list[Any] = []

        def items() -> Any:
            nonlocal rows
            for count, item in given:
                if not count:
                    repeated.append(item)
                    return
                rows += count
                yield item

        own, numbers = items(), {}
        first = next(own, None)
        if first is None:
            self.model.reset_metrics()
        else:
            data = as_taken(self._progress.spec.model.backend, first, own, self._progress.spec.prefetch)
            numbers = self.model.evaluate(data, verbose=0, return_dict=True)
        for item in itertools.chain(repeated, (item for _, item in given)):
            with rank_state.metrics_kept(self.model):
                self.model.test_on_batch(*item)
        return rows, values(numbers)


class AfterOthers(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Comes last: keeps the record of an epoch, and saves the run as the other callbacks have left it."""

    def __init__(self, progress: FitProgress, log: Any = None) -> None:
        super().__init__()
        self._progress = progress
        self._trained_on = Fingerprint.of(progress.spec.dataset, progress.spec.inputs)
        self._log = log
        #: The batch with which a step or several began, and whether a checkpoint within the epoch is due.
        self._first = 0
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:
        """The user's callbacks have begun: let them go on where the run stands."""
        self._progress.states.restore()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remember which it is."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save within the epoch where it is time; every rank takes part."""
        progress, spec, done = self._progress, self._progress.spec, batch + 1
        steps = progress.batches.readers.train_steps
        # Several steps may be executed at once: what is due amid them is saved behind them, or behind the group of
        # passes in which they end.
        made = range(self._first + 1, done + 1)
        self._is_due = (self._is_due or any(is_due_within(spec, step, steps) for step in made)) and done < steps
        if not self._is_due:
            return
        model = self.model
        # A run that is about to be stopped is saved when its epoch has ended.
        if model.stop_training or is_amid_passes(model, spec.backward_passes_per_step):
            return
        self._is_due = False
        _share_buffers(model)
        progress.losses.check(len(progress.history), lambda: _has_finite_weights(model))
        self._save(Running.after(done, spec, progress.hvd, rank_state.capture(model)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Close the record of the epoch."""
        progress, spec, hvd = self._progress, self._progress.spec, self._progress.hvd
        logged = spread(logs)
        speeds = hvd.allgather_object(
            (progress.timer.rows_per_s, progress.batches.timer.wait_share), name="hvd_cluster.speeds"
        )
        validation = {name[4:]: value for name, value in logged.items() if name.startswith("val_")}
        record = {
            "epoch": epoch,
            "train": part({name: value for name, value in logged.items() if not name.startswith("val_")}),
            **({"validation": part(validation)} if validation else {}),
            "samples_per_s": [speed for speed, _ in speeds],
            "data_wait_share": [share for _, share in speeds],
            "seconds": progress.timer.seconds,
            "padding_rows": progress.batches.readers.padding_rows,
            "logged": logged,
        }
        progress.history.append(record)
        if progress.best is not None:
            progress.best.keep(progress.history, hvd.size(), self._trained_on)
        is_stopped = bool(self.model.stop_training)
        is_last = is_stopped or len(progress.history) == spec.epochs
        files = RunFiles.of(spec)
        if files.are_kept and (is_last or len(progress.history) % spec.checkpoint_every_epochs == 0):
            self._save(stopped_of=spec.epochs if is_stopped else None)
        self._progress.reports.epoch(record)
        if self._log is not None:
            self._log(record)

    def _save(self, running: Running | None = None, stopped_of: int | None = None) -> None:
        """Save the run, on rank 0."""
        progress = self._progress
        if progress.hvd.rank() != 0:
            return
        body = capture(self.model, progress.rate_factor, progress.states.capture())
        snapshot = Snapshot(body, progress.history, progress.hvd.size(), self._trained_on, stopped_of, running)
        RunFiles.of(progress.spec).save(snapshot.to_bytes())


def _has_finite_weights(model: Any) -> bool:
    floating = (weight for weight in model.trainable_weights if keras.backend.is_float_dtype(weight.dtype))
    return all(bool(keras.ops.all(keras.ops.isfinite(weight))) for weight in floating)


def _share_buffers(model: Any) -> None:
    """Give all ranks what rank 0 has besides its trained weights, such as running means.

    The model that is saved and returned is rank 0's: so that one is validated, and a resumed run starts as this one
    goes on.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    broadcast_variables(model.non_trainable_weights, root_rank=0)
