"""Scoring in the tasks of a cluster, which load the model once per process."""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hvd_cluster.engine.objects import dumps
from hvd_cluster.errors import LaunchError
from hvd_cluster.estimators.scoring.scorer import Scored, Scorer
from hvd_cluster.launch.call import HOST_REMEDY, unimportable_text
from hvd_cluster.launch.pickling import loads
from hvd_cluster.oldpaths.shim import serves_horovod

#: Models that a process caches: a pipeline scores with a few.
CACHED_MODELS = 2

_cache: OrderedDict[str, Any] = OrderedDict()
_cache_lock = threading.Lock()


@dataclass(frozen=True)
class Scoring:
    """A model and how it scores, pickled with its functions.

    These may need modules that a task lacks.
    """

    scorer: Scorer
    #: The user's function for one row, if any.
    predict_fn: Callable[..., Any] | None
    model: Any

    @staticmethod
    def pickled(scorer: Scorer, predict_fn: Callable[..., Any] | None, model: bytes) -> bytes:
        """The bytes that unpickle to a Scoring with what ``model`` unpickles to."""
        return dumps(_Packed(scorer, predict_fn, model))

    def score(self, rows: Any) -> Scored:
        """Score an Arrow table or batch."""
        if self.predict_fn is None:
            return self.scorer.score(self.model, rows)
        from hvd_cluster.estimators.spark.rows import rows_of

        return Scored(self.scorer.score_rows(self.model, self.predict_fn, rows_of(rows)))


class _Packed:
    def __init__(self, scorer: Scorer, predict_fn: Callable[..., Any] | None, model: bytes) -> None:
        self._parts = scorer, predict_fn, model

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _unpacked(scorer: Scorer, predict_fn: Callable[..., Any] | None, model: bytes) -> Scoring:
    return Scoring(scorer, predict_fn, loads(model))


@dataclass(frozen=True)
class ShippedModel:
    """A model, or a Scoring, that is sent to the tasks of a cluster."""

    #: Hash of its bytes, the key of the cache.
    key: str
    #: The argument of :func:`hvd_cluster.spark.barrier.receive`.
    source: Any
    #: ``import horovod`` works where it was pickled, and its modules may use that.
    as_horovod: bool = field(default_factory=serves_horovod)
    #: How to install a module that tasks lack; see :func:`hvd_cluster.launch.call.pack_call`.
    remedy: str = HOST_REMEDY

    def load(self) -> Any:
        """The model, unpickled once per process.

        Raises:
            LaunchError: a module of the model cannot be imported here; the text names it and the remedy.
        """
        with _cache_lock:
            if self.key not in _cache:
                from hvd_cluster.spark.barrier import receive

                if self.as_horovod:
                    importlib.import_module("hvd_cluster.compat")
                try:
                    _cache[self.key] = loads(receive(self.source))
                except ImportError as error:
                    text = unimportable_text(error, self.remedy)
                    raise LaunchError(f"the model cannot be rebuilt in this task: {text}") from error
                while len(_cache) > CACHED_MODELS:
                    _cache.popitem(last=False)
            _cache.move_to_end(self.key)
            return _cache[self.key]


def content_key(blob: bytes) -> str:
    """The key of a pickled model."""
    return hashlib.sha256(blob).hexdigest()


def score_batches(shipped: ShippedModel, batches: Iterator[Any]) -> Iterator[Any]:
    """The function for ``mapInArrow``: appends outputs to each batch's columns."""
    import pyarrow as pa

    scoring: Scoring = shipped.load()
    for batch in batches:
        scored = scoring.score(batch)
        names = [*batch.schema.names, *(column.name for column in scoring.scorer.columns)]
        yield pa.RecordBatch.from_arrays([*scored.of(batch).columns, *scored.columns], names=names)
