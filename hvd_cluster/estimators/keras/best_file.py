"""What a ``ModelCheckpoint`` that only saves the best epoch writes, on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvd_cluster.estimators.keras.spec import KerasSpec
from hvd_cluster.estimators.run.best_file import BestFile
from hvd_cluster.estimators.run.worker_run import WorkerRun


class KerasBestFile(BestFile):
    """The file, and the value that the next best epoch has to beat.

    Args:
        run: on this worker.
        callback: the ``ModelCheckpoint``; its file is in the folder where this worker writes what the run keeps.
        model: as the run's checkpoint has it.
    """

    def __init__(self, run: WorkerRun[KerasSpec], callback: Any, model: Any) -> None:
        super().__init__(run)
        self.path = Path(str(callback.filepath))
        self._callback = callback
        #: The epochs from the best one on.
        self._earlier: list[dict[str, Any]] = []
        self.path.unlink(missing_ok=True)  # of another worker, which may have died while it wrote
        best = self.restore(self.path)
        if best is not None:
            self._earlier = run.history[best.epochs - 1 :]
        elif run.resumed is not None and run.partial_epoch is None:  # the last epoch is the best one known
            (model.save_weights if callback.save_weights_only else model.save)(str(self.path))
            self._earlier = run.history[-1:]

    def restore_value(self) -> None:
        """Give the ModelCheckpoint the value to beat, once the model has its metrics."""
        callback, earlier, self._earlier = self._callback, self._earlier, []
        if earlier and callback.monitor_op is None:
            callback._set_monitor_op()  # Keras sets it only when an epoch ends
        for record in earlier:
            value = record["logged"].get(callback.monitor)
            if value is not None and (callback.best is None or callback.monitor_op(value, callback.best)):
                callback.best = value
