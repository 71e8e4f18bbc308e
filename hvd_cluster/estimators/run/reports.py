"""What rank 0 reports to the driver during a fit."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from hvd_cluster.engine import current
from hvd_cluster.estimators.view.time_shares import TimeShares
from hvd_cluster.launch import progress

if TYPE_CHECKING:
    from hvd_cluster.data.store import Store
    from hvd_cluster.estimators.spec import FitSpec

logger = logging.getLogger(__name__)

#: The least time between two reports; through the store each report writes a file.
INTERVAL_S = 0.2
STORE_INTERVAL_S = 2.0


class Reports:
    """Reports of rank 0, by the launcher or the store; other ranks report nothing."""

    def __init__(self, spec: FitSpec, rank: int) -> None:
        self._spec = spec
        self._is_reporting = rank == 0
        self._through_store = spec.report_through_store and spec.store.saving_runs()
        self._due_s = 0.0
        self._step: dict[str, Any] = {}
        self._records: list[dict[str, Any]] = []
        self._has_warned = False

    def is_due(self, last: bool) -> bool:
        """Whether to call :meth:`step`; always at the last step of an epoch."""
        return self._is_reporting and (last or time.monotonic() >= self._due_s)

    def step(self, **fields: Any) -> None:
        """Report progress in an epoch.

        The fields are ``epoch``, ``epochs``, ``step``, ``steps``, ``loss``, and more.
        """
        if not self._is_reporting:
            return
        self._due_s = time.monotonic() + (STORE_INTERVAL_S if self._through_store else INTERVAL_S)
        self._step = {**fields, **_monitored()}
        progress.report(**self._step)
        self._write()

    def epoch(self, record: dict[str, Any]) -> None:
        """Report the record of a finished epoch, validation included."""
        if not self._is_reporting:
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
        except OSError as error:  # progress is not worth failing a fit
            if not self._has_warned:
                logger.warning("the progress of run %r cannot be written to %s: %s", self._spec.run_id, path, error)
            self._has_warned = True
            return
        if is_stopped:
            raise RuntimeError("a driver callback has ended the fit")


def _monitored() -> dict[str, Any]:
    """The monitor's recent steps of all ranks; empty off rank 0 or without a monitor."""
    monitor = current.engine().job_monitor if current.is_initialized() else None
    if monitor is None or monitor.last_steps is None:
        return {}
    return {"time_shares": TimeShares.of_job(monitor.last_steps).to_fields()}


def stop_path_of(store: Store, run_id: str) -> str:
    """The file that asks rank 0 to end the fit if the driver cannot stop the workers."""
    return f"{store.get_run_path(run_id)}/stop"


def path_of(store: Store, run_id: str) -> str:
    """The file that reports a run's progress through the store."""
    return f"{store.get_run_path(run_id)}/progress.json"
