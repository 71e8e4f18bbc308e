"""What rank 0 tells the driver of a fit on the way, and how it gets there."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from hvd_cluster.launch import progress

if TYPE_CHECKING:
    from hvd_cluster.data.store import Store
    from hvd_cluster.estimators.spec import FitSpec

logger = logging.getLogger(__name__)

#: Progress is reported at most this often; through the store, where each report is a file that is written, less so.
INTERVAL_S = 0.2
STORE_INTERVAL_S = 2.0


class Reports:
    """Rank 0's end. What other ranks report goes nowhere."""

    def __init__(self, spec: FitSpec, rank: int) -> None:
        self._spec = spec
        self._speaks = rank == 0
        self._through_store = spec.report_through_store and spec.store.saving_runs
        self._due_s = 0.0
        self._step: dict[str, Any] = {}
        self._records: list[dict[str, Any]] = []
        self._has_warned = False

    def is_due(self, last: bool) -> bool:
        """Whether it is time for :meth:`step`; always at the last step of an epoch."""
        return self._speaks and (last or time.monotonic() >= self._due_s)

    def step(self, **fields: Any) -> None:
        """Where the epoch stands: ``epoch``, ``epochs``, ``step``, ``steps``, ``loss``, and what else there is."""
        if not self._speaks:
            return
        self._due_s = time.monotonic() + (STORE_INTERVAL_S if self._through_store else INTERVAL_S)
        self._step = fields
        progress.report(**fields)
        self._write()

    def epoch(self, record: dict[str, Any]) -> None:
        """The record of an epoch that has ended, validation included."""
        if not self._speaks:
            return
        self._records.append(record)
        progress.report(record=record)
        self._write()

    def _write(self) -> None:
        if not self._through_store:
            return
        path = path_of(self._spec.store, self._spec.run_id)
        try:
            is_stopped = self._spec.store.exists(stop_path_of(self._spec.store, self._spec.run_id))
            self._spec.store.write(path, json.dumps({"step": self._step, "records": self._records}))
        except OSError as error:  # progress is not worth a fit
            if not self._has_warned:
                logger.warning("the progress of run %r cannot be written to %s: %s", self._spec.run_id, path, error)
            self._has_warned = True
            return
        if is_stopped:
            raise RuntimeError("a driver callback has ended the fit")


def stop_path_of(store: Store, run_id: str) -> str:
    """The file by which the driver asks rank 0 to end, where it cannot stop the workers itself."""
    return f"{store.get_run_path(run_id)}/stop"


def path_of(store: Store, run_id: str) -> str:
    """The file that holds a run's progress where it travels through the store."""
    return f"{store.get_run_path(run_id)}/progress.json"
