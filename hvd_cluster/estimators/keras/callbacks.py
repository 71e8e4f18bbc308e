"""What watches a Keras fit on a worker. Importing this needs Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from hvd_cluster.estimators.keras.best_file import BestFile
from hvd_cluster.estimators.keras.callback_states import CallbackStates
from hvd_cluster.estimators.keras.data import KerasBatches
from hvd_cluster.estimators.keras.spec import KerasSpec
from hvd_cluster.estimators.keras.state import capture
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.snapshot import Snapshot
from hvd_cluster.estimators.run.watch import Watch
from hvd_cluster.estimators.torch import random_state
from hvd_cluster.keras.values import broadcast_variables


@dataclass
class Course:
    """How far a fit has come."""

    spec: KerasSpec
    #: ``hvd_cluster.torch``.
    hvd: Any
    batches: KerasBatches
    history: list[dict[str, Any]]
    #: By what the learning rate of one worker is multiplied.
    rate_factor: float
    #: Of the user's callbacks.
    states: CallbackStates
    watch: Watch = field(default_factory=Watch)
    #: The best epoch's file, on rank 0; None where none is wanted.
    best: BestFile | None = None


class BeforeOthers(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Comes first: what the other callbacks see of an epoch is the same on all ranks, validation included."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self._course = course
        self._reports = Reports(course.spec, course.hvd.rank())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to measure."""
        self._course.watch = self._course.batches.watch = Watch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Seed the rank in each epoch, so that a resumed run draws what an undisturbed one draws.

        Not before: what Keras draws when it makes its iterator, at the beginning of a fit, is no part of an epoch.
        """
        if batch > 0:
            return
        course = self._course
        epoch = len(course.history)
        random_state.seed_all(course.spec.seed, epoch, course.hvd.rank())
        for index, generator in enumerate(seed_generators(self.model)):
            words = np.random.SeedSequence([course.spec.seed, epoch, course.hvd.rank(), index]).generate_state(2)
            generator.state.assign(keras.ops.convert_to_tensor(words >> 1, dtype=generator.state.dtype))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report now and then."""
        course, spec = self._course, self._course.spec
        steps = course.batches.readers.train_steps
        # Several steps may be executed at once, and then ``batch`` is the last of them.
        course.watch.rows = (batch + 1) * spec.batch_size
        if self._reports.is_due(last=batch + 1 == steps):
            numbers = {name: float(value) for name, value in (logs or {}).items()}
            self._reports.step(
                epoch=len(course.history),
                epochs=spec.epochs,
                step=batch + 1,
                steps=steps,
                loss=numbers.pop("loss", float("nan")),
                metrics=numbers,
                samples_per_s=course.watch.rows_per_s * course.hvd.size(),
                data_wait_share=course.batches.watch.wait_share,
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the training's numbers, and validate rank 0's model."""
        logs = {} if logs is None else logs
        model, course = self.model, self._course
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        broadcast_variables(model.non_trainable_weights, root_rank=0)
        logs.update(_means([(1, numbers) for numbers in self._gathered({k: float(v) for k, v in logs.items()})]))
        if course.spec.validation_is_there:
            found = _means(self._gathered(self._validated()))
            logs.update({f"val_{name}": value for name, value in found.items()})
        if course.best is not None:
            course.best.take_up()

    def _gathered(self, mine: Any) -> list[Any]:
        return self._course.hvd.allgather_object(mine, name="hvd_cluster.keras.logs")  # type: ignore[no-any-return]

    def _validated(self) -> tuple[int, dict[str, float]]:
        """Rows of this rank, and the loss and the metrics over them."""
        rows = 0

        def items() -> Any:
            nonlocal rows
            for count, item in self._course.batches.validation():
                rows += count
                yield item

        given = items()
        first = next(given, None)
        if first is None:
            return 0, {}
        numbers = self.model.evaluate(_chained(first, given), verbose=0, return_dict=True)
        return rows, {name: float(value) for name, value in numbers.items()}


class AfterOthers(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Comes last: keeps the record of an epoch, and saves the run as the other callbacks have left it."""

    def __init__(self, course: Course, log: Any = None) -> None:
        super().__init__()
        self._course = course
        self._reports = Reports(course.spec, course.hvd.rank())
        self._trained_on = Fingerprint.of(course.spec.dataset, course.spec.inputs)
        self._log = log

    def on_train_begin(self, logs: Any = None) -> None:
        """The user's callbacks have begun: let them go on where the run stands."""
        self._course.states.restore()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Close the record of the epoch."""
        course, spec, hvd = self._course, self._course.spec, self._course.hvd
        logged = {name: float(value) for name, value in (logs or {}).items()}
        speeds = hvd.allgather_object(
            (course.watch.rows_per_s, course.batches.watch.wait_share), name="hvd_cluster.speeds"
        )
        validation = {name[4:]: value for name, value in logged.items() if name.startswith("val_")}
        record = {
            "epoch": epoch,
            "train": _part({name: value for name, value in logged.items() if not name.startswith("val_")}),
            **({"validation": _part(validation)} if validation else {}),
            "samples_per_s": [speed for speed, _ in speeds],
            "data_wait_share": [share for _, share in speeds],
            "seconds": course.watch.seconds,
            "padding_rows": course.batches.readers.padding_rows,
            "logged": logged,
        }
        course.history.append(record)
        if course.best is not None:
            course.best.keep()
        is_stopped = bool(self.model.stop_training)
        is_last = is_stopped or len(course.history) == spec.epochs
        files = RunFiles.of(spec)
        if hvd.rank() == 0 and files.are_kept and (is_last or len(course.history) % spec.checkpoint_every_epochs == 0):
            body = capture(self.model, course.rate_factor, course.states.capture())
            stopped_of = spec.epochs if is_stopped else None
            files.save(Snapshot(body, course.history, hvd.size(), self._trained_on, stopped_of).to_bytes())
        self._reports.epoch(record)
        if self._log is not None:
            self._log(record)


def seed_generators(model: Any) -> list[Any]:
    """The generators of a model's random layers, in the order of the layers."""
    found = {}
    for layer in model._flatten_layers():
        held = [*getattr(layer, "_seed_generators", []), *vars(layer).values()]
        found.update({id(one): one for one in held if isinstance(one, keras.random.SeedGenerator)})
    return list(found.values())


def _part(numbers: Mapping[str, float]) -> dict[str, Any]:
    rest = {name: value for name, value in numbers.items() if name != "loss"}
    return {**({"loss": numbers["loss"]} if "loss" in numbers else {}), "all_metrics": [rest]}


def _means(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Means of each number over the ranks, each weighted by its rows."""
    rows = sum(count for count, _ in parts)
    names = dict.fromkeys(name for _, numbers in parts for name in numbers)
    return {name: sum(count * numbers[name] for count, numbers in parts if count) / rows for name in names}


def _chained(first: Any, rest: Any) -> Any:
    yield first
    yield from rest
