"""A fit's run as a worker sees it: its progress, where it is saved and reported."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from hvd_cluster.estimators.run.checkpoint import Checkpoint, PartialEpoch
from hvd_cluster.estimators.run.epoch_shares import EpochShares
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.spec import FitSpec
from hvd_cluster.monitor.timed_calls import timed_items

logger = logging.getLogger(__name__)

#: Key of the number of rows left out, in what a rank holds of a partial epoch.
_LEFT_OUT = "left_out_rows"

S = TypeVar("S", bound=FitSpec)
T = TypeVar("T")


class EpochTimer:
    """Measures an epoch from now on, and how much of it is spent waiting for batches."""

    def __init__(self) -> None:
        #: Rows that this rank has trained on; the training loop adds them.
        self.rows = 0
        #: Rows that the batches of the last validation lacked, because ``preprocess`` failed on them.
        self.validation_left_out_rows = 0
        self._start_s = time.perf_counter()
        self._waited_s = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time within the context counts as waiting."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start_s

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def rows_per_s(self) -> float:
        return self.rows / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        """Between 0 and 1."""
        return self._waited_s / max(self.seconds, 1e-9)


class WorkerRun(Generic[S]):
    """What all frameworks do with a run; each brings the state to save.

    Every rank makes one.

    Args:
        spec: the run.
        hvd: ``hvd_cluster.torch``.

    Raises:
        DataError: the run's checkpoint is of other data, or is not a checkpoint.
    """

    def __init__(self, spec: S, hvd: Collectives) -> None:
        self.spec = spec
        self.hvd = hvd
        self.files = RunFiles.of(spec)
        self.trained_on = Fingerprint.of(spec.dataset, spec.inputs)
        #: The checkpoint that this start of the run continues from.
        self.resumed = Checkpoint.broadcast(self.files, hvd)
        #: A record for each finished epoch.
        self.history: list[dict[str, Any]] = []
        #: The interrupted epoch of ``resumed``, until it continues.
        self.partial_epoch: PartialEpoch | None = None
        if self.resumed is not None:
            self.resumed.trained_on.require(spec.run_id, self.trained_on)
            self.history = list(self.resumed.history)
            self.partial_epoch = self.resumed.partial_epoch
            logger.info("run %s resumes after epoch %d", spec.run_id, self.epoch)
        #: Rows that training batches lacked, by epoch and step: batches are read ahead, also of the next epoch. The
        #: step -1 has those of the interrupted epoch before it continues, on all ranks: rank 0 counts them on.
        self._left_out: dict[tuple[int, int], int] = {}
        #: Held to use ``_left_out``: TensorFlow reads ahead in another thread.
        self._left_out_lock = threading.Lock()
        if self.partial_epoch is not None and hvd.rank() == 0:
            self._left_out[self.epoch, -1] = sum(rank.get(_LEFT_OUT, 0) for rank in self.partial_epoch.ranks)
        #: Of the current epoch.
        self.timer = EpochTimer()
        self._shares = EpochShares(hvd.local_rank() == 0)
        #: Rows that an epoch uses a second time.
        self.padding_rows = 0
        self.reports = Reports(spec, hvd.rank())

    @property
    def epoch(self) -> int:
        """Index of the current epoch."""
        return len(self.history)

    @property
    def is_over(self) -> bool:
        """Whether the run has its last epoch, or early stopping ends it."""
        return self.checkpoint({}).is_over(self.spec)

    def timed(self, batches: Iterable[T], epoch: int, done: int) -> Iterator[T]:
        """The same batches; the wait for each counts as waiting in the current epoch.

        Args:
            batches: those of an epoch, without its first ``done``.
        """
        iterator = timed_items(batches)
        for step in itertools.count(done):
            try:
                with self.timer.waiting():
                    batch = next(iterator)
            except StopIteration:
                return
            if num_left_out := getattr(batch, "num_left_out", 0):
                with self._left_out_lock:
                    self._left_out[epoch, step] = num_left_out
            yield batch

    def validated(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, of the validation rows; the rows that they lack are counted."""
        self.timer.validation_left_out_rows = 0
        for batch in batches:
            self.timer.validation_left_out_rows += getattr(batch, "num_left_out", 0)
            yield batch

    def left_out_rows(self, is_validated: bool = True) -> dict[str, int]:
        """The part of an epoch's record about left-out rows, once it is validated.

        The same on every rank; every rank takes part. Empty if a bad row ends the fit.

        Args:
            is_validated: the epoch has had a validation, if there are validation rows.
        """
        if self.spec.preprocess is None or self.spec.preprocess.on_error == "raise":
            return {}
        own = {"left_out_rows": self._left_out_before()}
        if self.spec.has_validation and is_validated:
            own["validation_left_out_rows"] = self.timer.validation_left_out_rows
        gathered = self.hvd.allgather_object(own, name="hvd_cluster.left_out_rows")
        return {name: sum(rank[name] for rank in gathered) for name in own}

    def start_epoch(self) -> None:
        """Measure from now on."""
        self.timer = EpochTimer()
        with self._left_out_lock:
            self._left_out = {place: rows for place, rows in self._left_out.items() if place[0] >= self.epoch}

    def partial(self, done: int, own: dict[str, Any]) -> PartialEpoch:
        """The epoch after ``done`` steps, where this rank holds ``own``; collective."""
        return PartialEpoch.after(done, self.spec, self.hvd, {**own, _LEFT_OUT: self._left_out_before(done)})

    def _left_out_before(self, done: float = math.inf) -> int:
        """Rows left out on this rank in the first ``done`` steps of the current epoch."""
        with self._left_out_lock:
            return sum(rows for (epoch, step), rows in self._left_out.items() if epoch == self.epoch and step < done)

    def report_step(self, step: int, steps: int, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Report the numbers of a step, which counts from 0, if it is time."""
        if self.reports.is_due(last=step + 1 == steps):
            self.reports.step(
                epoch=self.epoch,
                epochs=self.spec.epochs,
                step=step + 1,
                steps=steps,
                loss=float(loss),
                metrics={name: float(value) for name, value in metrics.items()},
                samples_per_s=self.timer.rows_per_s * self.hvd.size(),
                data_wait_share=self.timer.wait_share,
            )

    def record(self) -> dict[str, Any]:
        """The current epoch's record without its means, equal on all ranks; collective."""
        timer = self.timer
        own = (timer.rows_per_s, timer.wait_share, timer.seconds, self._shares.take(), self._shares.usage())
        gathered = self.hvd.allgather_object(own, name="hvd_cluster.speeds")
        speeds, waits, seconds, shares, usage = zip(*gathered, strict=True)
        return {
            "epoch": self.epoch,
            "samples_per_s": list(speeds),
            "data_wait_share": list(waits),
            "time_share": list(shares),
            "node_usage": {host: numbers for each in usage for host, numbers in each.items()},
            "seconds": max(seconds),
            "padding_rows": self.padding_rows,
        }

    def is_checkpoint_due(self, is_last: bool) -> bool:
        """Whether to save after the last epoch of ``history``."""
        return self.files.are_kept and (is_last or self.epoch % self.spec.checkpoint_every_epochs == 0)

    def is_checkpoint_due_within(self, done: int, steps: int) -> bool:
        """Whether to save after ``done`` steps, not within a batch group or at the end."""
        every = self.spec.checkpoint_every_steps
        if every is None or done >= steps or done % math.lcm(every, self.spec.backward_passes_per_step):
            return False
        return self.files.are_kept

    def checkpoint(
        self, state: Mapping[str, Any], partial_epoch: PartialEpoch | None = None, is_stopped: bool = False
    ) -> Checkpoint:
        """The run as it is now.

        Args:
            state: the framework's part, on the CPU.
            partial_epoch: the current epoch, if it has begun.
            is_stopped: a callback ends the fit here.
        """
        stopped_of = self.spec.epochs if is_stopped else None
        return Checkpoint(state, self.history, self.hvd.size(), self.trained_on, stopped_of, partial_epoch)
