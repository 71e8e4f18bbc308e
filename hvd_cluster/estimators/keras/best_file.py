"""The file of a run's best epoch: what a ModelCheckpoint that saves the best only writes, on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_cluster.estimators.keras.spec import KerasSpec
from hvd_cluster.estimators.run.run_files import RunFiles, is_own_folder


class BestFile:
    """Outlives the worker that wrote it: one that takes its place goes on with the best so far.

    Args:
        spec: the run.
        keeper: the ``ModelCheckpoint``; its file is in ``folder``.
        folder: where this worker writes what the run keeps.
        history: the epochs that the run has behind it.
    """

    def __init__(self, spec: KerasSpec, keeper: Any, folder: str, history: Sequence[dict[str, Any]]) -> None:
        self.path = Path(str(keeper.filepath))
        self._keeper = keeper
        # A folder of this worker's own goes with the worker.
        self._files = None if is_own_folder(spec, folder) else RunFiles.of(spec)
        blob = self._files.best() if self._files is not None and history else None
        if blob is not None:
            self.path.write_bytes(blob)
        self._before = list(history) if self.path.exists() else []
        self._written_ns = self._time_ns()

    @classmethod
    def of(cls, spec: KerasSpec, keeper: Any, folder: str, history: Sequence[dict[str, Any]]) -> BestFile | None:
        """That of ``keeper``; None where there is none, or one that does not look for the best."""
        return cls(spec, keeper, folder, history) if keeper is not None and keeper.save_best_only else None

    def take_up(self) -> None:
        """Tell the ModelCheckpoint what it has to beat; to be called once the model has its metrics."""
        keeper, before, self._before = self._keeper, self._before, []
        if before and keeper.monitor_op is None:
            keeper._set_monitor_op()  # it would do so itself, but only as it looks at an epoch
        for record in before:
            value = record["logged"].get(keeper.monitor)
            if value is not None and (keeper.best is None or keeper.monitor_op(value, keeper.best)):
                keeper.best = value

    def keep(self) -> None:
        """Keep the file with the run where it was written anew."""
        written_ns = self._time_ns()
        if written_ns != self._written_ns and self._files is not None:
            self._files.save(self.path.read_bytes(), best=True)
        self._written_ns = written_ns

    def _time_ns(self) -> int | None:
        return self.path.stat().st_mtime_ns if self.path.exists() else None
