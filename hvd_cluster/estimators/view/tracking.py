"""Track a fit in MLflow: a run with its params, each epoch's metrics, the model."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from hvd_cluster.data.optional import load_extra
from hvd_cluster.estimators.spec import as_warnings
from hvd_cluster.estimators.stages.param_row import HasParams
from hvd_cluster.estimators.view.history import rows
from hvd_cluster.estimators.view.params_text import text_of

logger = logging.getLogger(__name__)

#: Characters of a param's value that MLflow accepts.
_MAX_PARAM_CHARS = 500
#: The same of a metric's name.
_MAX_NAME_CHARS = 250
#: The maximum number of metrics in one request.
_MAX_METRICS = 1000


def epoch_metrics(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of an epoch by MLflow name, e.g. "system/node-a/cpu_percent"."""
    found = {name: float(value) for name, value in rows([record])[0].items() if name != "epoch"}
    for rank, shares in enumerate(record.get("time_share", [])):
        found |= {f"time_share/rank{rank}/{activity}": share for activity, share in shares.items()}
    for host, numbers in record.get("node_usage", {}).items():
        name = host.replace("/", "_")
        found |= {f"system/{name}/{resource}": value for resource, value in numbers.items()}
    taken: dict[str, float] = {}
    for name, value in found.items():
        taken[_accepted(name, taken)] = value
    return taken


def _accepted(name: str, others: Collection[str]) -> str:
    """A name for MLflow, unlike ``others``: one wrong name loses the epoch's metrics."""
    # On disk it is a path, which may not lead out of its folder.
    parts = [part for part in re.sub(r"[^\w./ -]", "_", name).split("/") if part]
    cleaned = "/".join("_" * len(part) if set(part) == {"."} else part for part in parts)
    cleaned = cleaned[:_MAX_NAME_CHARS].rstrip("/") or "_"
    numbered = (f"{cleaned[: _MAX_NAME_CHARS - 4]}_{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([cleaned], numbered) if one not in others)


class Tracker:
    """What a fit reports to while it runs; this one does nothing."""

    callbacks: tuple[Callable[[dict[str, Any]], Any], ...] = ()

    def finish(self, model: Any) -> None:
        """Report the model of a fit that has ended."""


class MlflowTracker(Tracker):
    """One run of MLflow, named by the fit's run id. Only the driver writes to it."""

    def __init__(self, mlflow: Any, client: Any, mlflow_run_id: str) -> None:
        self._mlflow = mlflow
        self._client = client
        self.run_id = mlflow_run_id
        self.callbacks = (self._log_epoch,)

    def _log_epoch(self, record: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now_ms, record["epoch"]) for name, value in epoch_metrics(record).items()]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self.run_id, metrics[start : start + _MAX_METRICS])

    def finish(self, model: Any) -> None:
        text = f"the model was not logged to MLflow; with mlflow.start_run(run_id={self.run_id!r}), log_model() logs it"
        with (
            as_warnings(text),
            self._mlflow.start_run(run_id=self.run_id, nested=self._mlflow.active_run() is not None),
        ):
            model.log_model()

    def end(self, status: str) -> None:
        """End the run as "FINISHED" or "FAILED"."""
        with as_warnings(f"MLflow's run {self.run_id} was not set to {status}"):
            self._client.set_terminated(self.run_id, status)


@contextlib.contextmanager
def tracked(stage: HasParams, run_id: str) -> Iterator[Tracker]:
    """The tracker of a fit; its MLflow run ends finished or failed with the context.

    Raises:
        MissingExtraError: ``mlflow`` is set, but MLflow is not installed.
    """
    wanted = stage._value("mlflow")
    if not wanted:
        yield Tracker()
        return
    mlflow = load_extra("mlflow", "mlflow", "to track the fit (mlflow=)")
    client = mlflow.MlflowClient()
    parent = mlflow.active_run()
    tags = {"mlflow.runName": run_id, **({"mlflow.parentRunId": parent.info.run_id} if parent is not None else {})}
    run = client.create_run(_experiment_id(client, wanted, parent), tags=tags)
    tracker = MlflowTracker(mlflow, client, run.info.run_id)
    try:
        for name, value in _params(stage).items():
            client.log_param(run.info.run_id, name, value)
        yield tracker
    except BaseException:  # raised again: the run must not look as if it still ran
        tracker.end("FAILED")
        raise
    tracker.end("FINISHED")


def _experiment_id(client: Any, wanted: bool | str, parent: Any) -> str:
    """The named experiment, made if needed; for True the active run's or current one."""
    if wanted is True:
        if parent is not None:
            return str(parent.info.experiment_id)
        from mlflow.tracking.fluent import _get_experiment_id

        return str(_get_experiment_id())
    found = client.get_experiment_by_name(wanted)
    return str(found.experiment_id if found is not None else client.create_experiment(wanted))


def _params(stage: HasParams) -> dict[str, str]:
    """The params that were given, as text without secrets."""
    given = {name: stage._value(name) for name, row in stage.param_rows.items() if stage.isSet(row.key)}
    shown = {name: text_of(name, value) for name, value in given.items() if name not in ("backend", "mlflow")}
    return {name: text[:_MAX_PARAM_CHARS] for name, text in shown.items()}
