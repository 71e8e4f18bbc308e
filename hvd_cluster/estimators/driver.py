"""One run of a fit as its driver sees it: start the workers, hear them, and start them again when one has died."""

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
from hvd_cluster.estimators import restarts
from hvd_cluster.estimators.backend import Backend, run_on
from hvd_cluster.estimators.run import reports, run_files
from hvd_cluster.estimators.run.epochs import EpochListener, StopFit
from hvd_cluster.estimators.run.run_files import ReceivedFiles
from hvd_cluster.estimators.view import preflight
from hvd_cluster.estimators.view.progress_bar import ProgressBar
from hvd_cluster.launch.worker_group import StopCall

logger = logging.getLogger(__name__)

#: Seconds between two looks at the progress that workers write to the store.
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DriverRun:
    """Everything that stays the same when workers are started again."""

    backend: Backend
    #: What each worker calls with the spec.
    train_fn: Callable[[Any], Any]
    store: Store
    max_restarts: int
    bar: ProgressBar
    epochs: EpochListener
    #: Raises where the fit may no longer write to the run.
    require_held: Callable[[], None]
    #: Rows for the workers that do not come through the store; what the backend takes as ``rows``.
    rows: Any = None

    def results(self, spec: Any) -> list[Any]:
        """What the workers returned, by rank.

        Where a driver callback raises :class:`StopFit`, that is what the run has come to so far.

        Raises:
            WorkerFailedError: the user's own exception, or a death after as many starts as are allowed.
            BaseException: what a driver callback raised.
        """
        received, digest = ReceivedFiles(self.store, spec.run_id), ""

        def hear(rank: int, fields: dict[str, Any]) -> None:
            nonlocal digest
            self._stopping_call(self.require_held)
            if "checkpoint" in fields:
                received.hear(fields)
            elif "data_digest" in fields:
                digest = fields["data_digest"]
            elif "record" in fields:
                self._stopping_call(lambda: self.epochs.hear([fields["record"]]))
            else:
                self.bar(rank, fields)

        self.bar.say(lambda: preflight.line(self.backend, spec, rows=self.rows))
        made = 0
        with self._watched(spec, hear) as stops:
            while True:
                try:
                    results = run_on(self.backend, self.train_fn, (self._resumed(spec, digest),), hear, self.rows)
                except StopCall as stop:
                    spec = self._stopped(spec, stop)
                except WorkerFailedError as error:
                    if stops:
                        self.store.delete(reports.stop_path_of(self.store, spec.run_id))
                        spec = self._stopped(spec, stops.pop())
                        continue
                    if not restarts.is_worth_another_start(error, made, self.max_restarts):
                        error.args = (str(error) + restarts.gave_up_text(made),)
                        raise
                    made += 1
                    first = str(error).strip().splitlines()[0]
                    logger.warning(
                        "run %r: %s The workers start again (%d of at most %d times)",
                        spec.run_id,
                        first,
                        made,
                        self.max_restarts,
                    )
                    self.backend.check_again()  # an executor that died takes a while to be replaced
                else:
                    with contextlib.suppress(StopFit):  # nothing is left to stop
                        self.epochs.hear(results[0].history)
                    return results

    @staticmethod
    def _stopping_call(act: Callable[[], None]) -> None:
        """Let what ``act`` raises stop the workers, from whatever thread hears them."""
        try:
            act()
        except BaseException as error:  # a driver callback may raise anything, and all of it ends the fit
            raise StopCall from error

    def _stopped(self, spec: Any, stop: StopCall) -> Any:
        """What is left to do of a run that a driver callback has ended: fetch its model.

        Workers start once more, and find that the epochs are done: what they return is then what any fit returns.

        Raises:
            BaseException: the callback's own, where that is no :class:`StopFit`.
        """
        error = stop.__cause__
        if not isinstance(error, StopFit):
            raise error if error is not None else stop
        logger.info("run %r: a driver callback has stopped the fit after epoch %d", spec.run_id, self.epochs.finished)
        return dataclasses.replace(spec, epochs=self.epochs.finished)

    def _resumed(self, spec: Any, digest: str) -> Any:
        """The spec with the checkpoints, where workers cannot fetch them themselves."""
        if not spec.store_on_driver:
            return spec
        last, best = (run_files.read(self.store, spec.run_id, suffix) for suffix in ("", run_files.BEST))
        # Without the last one training begins anew, and so does the search for the best.
        return dataclasses.replace(spec, resume=last, resume_best=None if last is None else best, data_digest=digest)

    @contextlib.contextmanager
    def _watched(self, spec: Any, hear: Callable[[int, dict[str, Any]], None]) -> Iterator[list[StopCall]]:
        """Look for progress in the store where that is how it comes; yields what is to stop the workers, once known."""
        stops: list[StopCall] = []
        if not spec.report_through_store:
            yield stops
            return
        stop_path = reports.stop_path_of(self.store, spec.run_id)
        self.store.delete(stop_path)  # of a driver that was killed

        def hear_or_stop(rank: int, fields: dict[str, Any]) -> None:
            try:
                hear(rank, fields)
            except StopCall as stop:
                stops.append(stop)
                self.store.write(stop_path, b"")

        ended = threading.Event()
        before = self._progress(spec.run_id)  # of another fit of this run, if anything
        watcher = threading.Thread(
            target=self._watch, args=(spec.run_id, hear_or_stop, ended, before), name="hvd-fit-progress"
        )
        watcher.start()
        try:
            yield stops
        finally:
            ended.set()
            watcher.join()
            self.store.delete(stop_path)

    def _watch(
        self,
        run_id: str,
        hear: Callable[[int, dict[str, Any]], None],
        ended: threading.Event,
        seen: dict[str, Any] | None,
    ) -> None:
        while not ended.wait(_LOOK_S):
            told = self._progress(run_id)
            if told is None or told == seen:
                continue
            seen = told
            if told["step"]:
                hear(0, told["step"])
            for record in told["records"]:
                hear(0, {"record": record})

    def _progress(self, run_id: str) -> dict[str, Any] | None:
        """What the store has of it; None where that is nothing, or half a file: progress is not worth a fit."""
        path = reports.path_of(self.store, run_id)
        try:
            told: dict[str, Any] | None = json.loads(self.store.read(path)) if self.store.exists(path) else None
        except (OSError, ValueError) as error:
            logger.debug("the progress of run %r cannot be read: %s", run_id, error)
            return None
        return told
