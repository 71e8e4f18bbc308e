"""A framework's ``ModelCheckpoint`` file for the best epoch, kept with the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.monitor.step_clock import SAVE, step_clock

logger = logging.getLogger(__name__)


class BestFile:
    """A file that outlives its worker: the next one continues with the best so far.

    The history up to that epoch is kept with it: the epoch may be one that the run has left, because its worker died
    before the run was saved.
    """

    def __init__(self, run: WorkerRun[Any]) -> None:
        self.run = run
        self._kept: tuple[Path, int] | None = None

    @step_clock.span(SAVE)
    def save(self, path: Path) -> None:
        """Keep the file if it has changed.

        Call this on rank 0, before the run is saved with the same history.
        """
        if path.exists() and (version := _version(path)) != self._kept:
            self.run.checkpoint({"file": file_tensor(path)}).save(self.run.files, best=True)
            self._kept = version

    def restore(self, path: Path) -> Checkpoint | None:
        """Write the file that the run kept; return the checkpoint that held it, or None."""
        if self.run.resumed is None:
            return None
        try:
            best = Checkpoint.load_best(self.run.files, self.run.history)
        except DataError as error:
            logger.warning("the search for the best epoch restarts: %s", error)
            return None
        if best is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            best.state["file"].numpy().tofile(path)
            self._kept = _version(path)
        return best


def _version(path: Path) -> tuple[Path, int]:
    return path, path.stat().st_mtime_ns


def file_tensor(path: Path) -> torch.Tensor:
    """The bytes of a file, shape (bytes,), uint8."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8))
