"""What every estimator does, whatever its framework: check, write the data, run the workers, make a model of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import secrets
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.materialize import materialize
from hvd_cluster.data.schema import missing_columns_text
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators.backend import Backend, LocalBackend, SparkBackend, check, run_on
from hvd_cluster.estimators.fingerprint import Fingerprint
from hvd_cluster.estimators.frames import Frame, column_names, kind_of
from hvd_cluster.estimators.progress_bar import ProgressBar
from hvd_cluster.estimators.stage import Estimator, Stage
from hvd_cluster.launch.call import pack

if TYPE_CHECKING:
    from hvd_cluster.estimators.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


class DistributedEstimator(Stage, Estimator):
    """Base of the estimators; a framework brings the five abstract methods."""

    #: First part of the run ids that are made up.
    run_prefix = "run"

    @abstractmethod
    def _mistakes(self) -> list[str]:
        """What is wrong with the params of this framework, each with its remedy; empty if nothing."""

    @abstractmethod
    def _train_spec(self, dataset: Dataset, store: Store, run_id: str, seed: int) -> Any:
        """The spec of the run over the materialised ``dataset``, tried on a few rows."""

    @abstractmethod
    def _checkpoint(self, store: Store, run_id: str) -> Checkpoint | None:
        """The run's checkpoint, tried on the model and the optimizer; None where there is none.

        Raises:
            DataError: it is of another model or optimizer, or no checkpoint at all.
        """

    @abstractmethod
    def _train_fn(self) -> Callable[[Any], Any]:
        """The importable function that trains from the spec, in a worker."""

    @abstractmethod
    def _create_model(self, results: list[Any], spec: Any) -> Any:
        """The model from what the workers returned."""

    def _fit(self, dataset: Any) -> Any:
        kind = kind_of(dataset)
        names = column_names(dataset)
        self._check(kind, names)
        self._check_picklable()
        run_id = self._value("run_id") or _new_run_id(self.run_prefix)
        given_seed = self._value("random_seed")
        # By the name of the run, so that resuming it splits and shuffles as before.
        seed = zlib.crc32(run_id.encode()) if given_seed is None else given_seed
        backend = self._backend_for(kind, dataset)
        with self._opened_store() as store:
            store.check_writable()
            found = self._checkpoint(store, run_id)
            check(backend)
            prepared = materialize(
                dataset,
                store,
                columns=self._columns(names),
                validation=self._value("validation") or None,
                num_proc=backend.num_processes(),
                partitions_per_process=self._value("partitions_per_process"),
                seed=seed,
                allow_ragged=self._value("transformation_fn") is not None,
            )
            try:
                spec = self._train_spec(prepared, store, run_id, seed)
                if found is not None:
                    found.require_data(run_id, Fingerprint.of(prepared, spec.inputs))
                    logger.warning("%s", _resumed_text(run_id, found.epochs, self._value("epochs")))
                logger.info(
                    "run %s: %d workers, %d training rows", run_id, backend.num_processes(), prepared.train.rows
                )
                with ProgressBar(run_id, enabled=self._value("verbose") > 0) as bar:
                    results = run_on(backend, self._train_fn(), (spec,), bar)
            except WorkerFailedError as error:
                error.args = (str(error) + self._left_text(store, run_id),)
                raise
            finally:
                prepared.remove()
        return self._create_model(results, spec)

    def _left_text(self, store: Store, run_id: str) -> str:
        """What a failed run has left to go on from, in a line of its own; empty if nothing."""
        if self._value("store") is None:  # its folder goes with this fit
            return ""
        try:
            found = self._checkpoint(store, run_id)
        except (OSError, DataError):  # the workers' failure is the one to tell
            return ""
        if found is None:
            return ""
        return (
            f"\nRun {run_id!r} has a checkpoint of epoch {found.epochs} of {self._value('epochs')}: fit again with "
            f"run_id={run_id!r} to go on from there."
        )

    def _feature_columns(self, names: list[str]) -> list[str]:
        """``feature_cols``, or all columns that serve no other purpose."""
        if self._value("feature_cols") is not None:
            return list(self._value("feature_cols"))
        others = {*(self._value("label_cols") or []), self._value("sample_weight_col"), self._value("validation")}
        return [name for name in names if name not in others]

    def _columns(self, names: list[str]) -> list[str]:
        """Every column that workers read, once."""
        weight = [self._value("sample_weight_col")] if self._value("sample_weight_col") else []
        return list(dict.fromkeys([*self._feature_columns(names), *self._value("label_cols"), *weight]))

    def _check(self, kind: Frame, names: list[str]) -> None:
        """Raise for everything that is wrong with the params and the columns, all at once."""
        wrong = [
            f"{row.name}=None: give a value; the default is {row.default!r}"
            for row in self.param_rows.values()
            if not row.optional and self._value(row.name) is None
        ]
        if self._value("backend") is not None and self._value("num_proc") is not None:
            wrong.append('At most one of parameters "backend" and "num_proc" may be specified')
        if not self._value("label_cols"):
            wrong.append("label_cols is required: name the column that the model is to predict")
        if kind is Frame.SPARK and self._value("store") is None:
            wrong.append(
                "store is required with a Spark DataFrame: give a folder that the driver and all executors see, for "
                'example store="/dbfs/work" or store="s3://bucket/work"'
            )
        wrong += self._mistakes()
        named = [*(self._value("feature_cols") or []), *(self._value("label_cols") or [])]
        named += [
            self._value(name) for name in ("sample_weight_col", "validation") if isinstance(self._value(name), str)
        ]
        missing = [name for name in dict.fromkeys(named) if name not in names]
        if missing:
            wrong.append(missing_columns_text(missing, names))
        elif self._value("label_cols") and not self._feature_columns(names):
            wrong.append("feature_cols: no column is left for the model's input")
        if wrong:
            raise ValueError("\n".join(wrong))

    def _check_picklable(self) -> None:
        """Name what cannot travel to the workers, before anything is written."""

        def fit(**params: Any) -> None: ...

        fit.__qualname__ = f"{type(self).__name__}.fit"
        objects = {name: self._value(name) for name, row in self.param_rows.items() if row.saved and name != "store"}
        pack(fit, kwargs=objects)

    def _get_or_create_backend(self) -> Any:
        """The ``backend`` param, or a SparkBackend of ``num_proc`` workers. Subclasses may bring their own."""
        return self._value("backend") or SparkBackend(self._value("num_proc"), verbose=self._value("verbose"))

    def _backend_for(self, kind: Frame, data: Any) -> Backend:
        overridden = type(self)._get_or_create_backend is not DistributedEstimator._get_or_create_backend
        if overridden or self._value("backend") is not None:
            backend: Backend = self._get_or_create_backend()
            return backend
        num_proc, verbose = self._value("num_proc"), self._value("verbose")
        if kind is Frame.SPARK:
            return SparkBackend(num_proc, verbose=verbose, spark=data.sparkSession)
        return LocalBackend(num_proc, verbose=verbose)

    @contextlib.contextmanager
    def _opened_store(self) -> Iterator[Store]:
        """The ``store`` param as a Store; a temporary folder for the time of the fit where there is none."""
        if self._value("store") is not None:
            yield Store.create(self._value("store"))
            return
        with tempfile.TemporaryDirectory(prefix="hvd_cluster-fit-") as folder:
            yield Store.create(Path(folder))


def as_group(value: Any, count: int) -> tuple[Any, ...]:
    """One thing for each label column: a single one stands for all."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * count


def wrong_counts(lists: dict[str, Any], count: int, of: str) -> list[str]:
    """A complaint for each of ``lists`` (None is fine) that has not one entry for each of ``count`` columns."""
    return [
        f"{name} has {len(value)} entries for {count} {of}: give one for each"
        for name, value in lists.items()
        if isinstance(value, (list, tuple)) and len(value) != count
    ]


def _resumed_text(run_id: str, finished: int, epochs: int) -> str:
    if finished < epochs:
        return f"run {run_id!r} goes on after epoch {finished} of {epochs}"
    return (
        f"run {run_id!r} has finished {finished} of {epochs} epochs and has nothing left to train: raise epochs to go "
        "on, or choose another run_id to train anew"
    )


def _new_run_id(prefix: str) -> str:
    now = dt.datetime.now(dt.timezone.utc)
    return f"{prefix}_{now:%Y%m%d_%H%M%S}_{secrets.token_hex(3)}"
