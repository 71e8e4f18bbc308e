"""The file of a run's best epoch: what a ModelCheckpoint that saves the best only writes, on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvd_cluster.estimators.keras.spec import KerasSpec
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.snapshot import Snapshot


class BestFile:
    """Outlives the worker that wrote it: one that takes its place goes on with the best so far.

    It is kept with the run together with the epochs of which it is the best: the file alone may be of an epoch that the
    run has left, since its worker died before the run was saved.

    Args:
        spec: the run.
        keeper: the ``ModelCheckpoint``; its file is in the folder where this worker writes what the run keeps.
        found: the run that is gone on with.
        model: as it was then.
    """

    def __init__(self, spec: KerasSpec, keeper: Any, found: Snapshot | None, model: Any) -> None:
        self.path = Path(str(keeper.filepath))
        self._keeper = keeper
        self._files = RunFiles.of(spec)
        #: The epochs from the best one on.
        self._before: list[dict[str, Any]] = []
        best = Snapshot.best_of(self._files, found.history) if found is not None else None
        self.path.unlink(missing_ok=True)  # another worker's, which may have died while it wrote
        if best is not None and found is not None:
            self.path.write_bytes(best.body)
            self._before = found.history[best.epochs - 1 :]
        self._written_ns = self._time_ns()
        if best is None and found is not None and found.running is None:  # then the last one is the best there is
            (model.save_weights if keeper.save_weights_only else model.save)(str(self.path))
            self._before = found.history[-1:]

    @classmethod
    def of(cls, spec: KerasSpec, keeper: Any, found: Snapshot | None, model: Any) -> BestFile | None:
        """That of ``keeper``; None where there is none, or one that does not look for the best."""
        return cls(spec, keeper, found, model) if keeper is not None and keeper.save_best_only else None

    def take_up(self) -> None:
        """Tell the ModelCheckpoint what it has to beat; to be called once the model has its metrics."""
        keeper, before, self._before = self._keeper, self._before, []
        if before and keeper.monitor_op is None:
            keeper._set_monitor_op()  # it would do so itself, but only as it looks at an epoch
        for record in before:
            value = record["logged"].get(keeper.monitor)
            if value is not None and (keeper.best is None or keeper.monitor_op(value, keeper.best)):
                keeper.best = value

    def keep(self, history: list[dict[str, Any]], size: int, trained_on: Fingerprint) -> None:
        """Keep the file with the run where it was written anew; before the run is saved that has come so far."""
        written_ns = self._time_ns()
        if written_ns is not None and written_ns != self._written_ns:
            self._files.save(Snapshot(self.path.read_bytes(), history, size, trained_on).to_bytes(), best=True)
        self._written_ns = written_ns

    def _time_ns(self) -> int | None:
        return self.path.stat().st_mtime_ns if self.path.exists() else None
