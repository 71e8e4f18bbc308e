"""The driver's side of a fit: run workers, receive reports, restart after deaths."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvd_cluster.data.store import Store
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators.backend import Backend, OnEvent, run_on
from hvd_cluster.estimators.run import reports
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.run.epochs import EpochListener, StopFit
from hvd_cluster.estimators.run.run_files import ReceivedFiles, RunFiles
from hvd_cluster.estimators.view.fit_log import preflight_line
from hvd_cluster.estimators.view.progress_bar import FitProgressBar
from hvd_cluster.launch.worker_group import StopCall

logger = logging.getLogger(__name__)

#: Seconds between two reads of the progress that workers write to the store.
_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DriverRun:
    """One run of a fit, over all restarts of its workers."""

    backend: Backend
    #: What each worker calls with the spec.
    train_fn: Callable[[Any], Any]
    store: Store
    max_restarts: int
    bar: FitProgressBar
    epochs: EpochListener
    #: Raises if the fit may no longer write to the run.
    require_held: Callable[[], None]
    #: Rows that reach the workers without a store; the ``rows`` of the backend's ``run``.
    rows: Any = None

    def results(self, spec: Any) -> list[Any]:
        """What the workers returned, by rank.

        If a driver callback raises :class:`StopFit`, these are the results up to the last checkpoint.

        Raises:
            WorkerFailedError: a worker raised, or one died after ``max_restarts`` restarts.
            BaseException: a driver callback raised it.
        """
        received, digest = ReceivedFiles(RunFiles(self.store, spec.run_id)), ""

        def on_event(rank: int, fields: dict[str, Any]) -> None:
            nonlocal digest
            self._stopping_call(self.require_held)
            if "checkpoint" in fields:
                self._stopping_call(lambda: received.add(fields))
            elif "data_digest" in fields:
                digest = fields["data_digest"]
            elif "record" in fields:
                self._stopping_call(lambda: self.epochs.add([fields["record"]]))
            else:
                self.bar(rank, fields)

        restarts = 0
        with self.bar, self._watched(spec, on_event) as stops:
            self.bar.say(lambda: preflight_line(self.backend, spec, rows=self.rows))
            while True:
                try:
                    results = run_on(self.backend, self.train_fn, (self._resumed(spec, digest),), on_event, self.rows)
                except StopCall as stop:
                    spec = self._stopped(spec, stop)
                except WorkerFailedError as error:
                    if stops:
                        self.store.delete(reports.stop_path_of(self.store, spec.run_id))
                        first = stops[0]
                        stops.clear()
                        spec = self._stopped(spec, first)
                        continue
                    if not error.died or restarts >= self.max_restarts:
                        if restarts:
                            text = f"The workers had been started again {restarts} times (max_restarts)."
                            error.args = (f"{error}\n{text}",)
                        raise
                    restarts += 1
                    logger.warning(
                        "run %r: %s The workers start again (%d of at most %d times) %s",
                        spec.run_id,
                        str(error).strip().splitlines()[0],
                        restarts,
                        self.max_restarts,
                        self._restart_text(spec),
                    )
                    self.backend.check_again()  # it takes a while to replace an executor that died
                else:
                    with contextlib.suppress(StopFit):  # all epochs are done
                        self.epochs.add(results[0].history)
                    return results

    def _restart_text(self, spec: Any) -> str:
        """Where training continues."""
        try:
            if not RunFiles(self.store, spec.run_id).has_last:
                return "from the beginning"
        except OSError:  # the store does not answer, which the workers report
            return "from the last checkpoint, if there is one"
        if spec.checkpoint_every_epochs > 1:
            return "from the last checkpoint"
        return f"after epoch {self.epochs.finished} of {spec.epochs}, from the last checkpoint"

    @staticmethod
    def _stopping_call(act: Callable[[], None]) -> None:
        """Stop the workers if ``act`` raises, in any thread that gets their reports."""
        try:
            act()
        except BaseException as error:  # whatever a driver callback or the store raises ends the fit
            raise StopCall from error

    def _stopped(self, spec: Any, stop: StopCall) -> Any:
        """The spec of a run that a driver callback has ended.

        It has as many epochs as the last checkpoint. Workers start once more and find nothing left to train, so that
        they return what any fit returns; or only the rest of an epoch within which the checkpoint was saved. Without a
        checkpoint they train again.

        Raises:
            BaseException: what the callback raised, unless that is a :class:`StopFit`.
        """
        error = stop.__cause__
        if not isinstance(error, StopFit):
            raise error if error is not None else stop
        logger.info("run %r: a driver callback has stopped the fit after epoch %d", spec.run_id, self.epochs.finished)
        last = Checkpoint.load(RunFiles(self.store, spec.run_id))
        # One that was saved within an epoch is trained to the end of that epoch.
        saved = 0 if last is None else last.epochs + (last.partial_epoch is not None)
        return dataclasses.replace(spec, epochs=min(saved or self.epochs.finished, spec.epochs))

    def _resumed(self, spec: Any, digest: str) -> Any:
        """The spec, with the checkpoints if workers cannot read them from the store."""
        if not spec.store_on_driver:
            return spec
        files = RunFiles(self.store, spec.run_id)
        last = files.last()
        # Without the last checkpoint training restarts, and so does the search for the best epoch.
        best = None if last is None else files.best()
        return dataclasses.replace(spec, resume=last, resume_best=best, data_digest=digest)

    @contextlib.contextmanager
    def _watched(self, spec: Any, on_event: OnEvent) -> Iterator[list[StopCall]]:
        """Poll the store for progress if workers report through it.

        Yields a list that gets what stops the workers.

        Raises:
            BaseException: what a driver callback raised after the workers had ended, or too late to stop them.
        """
        stops: list[StopCall] = []
        if not spec.report_through_store:
            yield stops
            return
        stop_path = reports.stop_path_of(self.store, spec.run_id)
        self.store.delete(stop_path)  # left by a driver that was killed

        def on_report(rank: int, fields: dict[str, Any]) -> None:
            try:
                on_event(rank, fields)
            except StopCall as stop:
                stops.append(stop)
                self.store.write(stop_path, b"")

        ended = threading.Event()
        before = self._progress(spec.run_id)  # an earlier fit of this run may have left it
        watcher = threading.Thread(
            target=self._watch, args=(spec.run_id, on_report, ended, before), name="hvd-fit-progress"
        )
        watcher.start()
        try:
            yield stops
        finally:
            ended.set()
            watcher.join()
            self.store.delete(stop_path)
        for stop in stops:
            if not isinstance(stop.__cause__, StopFit):  # all epochs are done
                raise stop.__cause__ or stop

    def _watch(
        self,
        run_id: str,
        on_report: OnEvent,
        ended: threading.Event,
        seen: dict[str, Any] | None,
    ) -> None:
        while not ended.wait(_POLL_S):
            found = self._progress(run_id)
            if found is None or found == seen:
                continue
            seen = found
            if found["step"]:
                on_report(0, found["step"])
            for record in found["records"]:
                on_report(0, {"record": record})

    def _progress(self, run_id: str) -> dict[str, Any] | None:
        """The progress in the store; None if absent or unreadable, so the fit continues."""
        path = reports.path_of(self.store, run_id)
        try:
            found: dict[str, Any] | None = json.loads(self.store.read(path)) if self.store.exists(path) else None
        except (OSError, ValueError) as error:
            logger.debug("the progress of run %r cannot be read: %s", run_id, error)
            return None
        return found
