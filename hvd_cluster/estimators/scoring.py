"""Scoring: Arrow batches in, one column for each output out. Knows no Spark; a Spark task calls it batch by batch."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from hvd_cluster.data.batches import to_arrow, to_tensors
from hvd_cluster.data.schema import infer
from hvd_cluster.data.vectors import vector_type
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.objective import as_outputs
from hvd_cluster.estimators.spec import Inputs

#: Type of an output column that holds several numbers a row.
VECTOR = "vector"
#: Models that a process keeps: a stream of batches may score with one, a pipeline with a few.
CACHED_MODELS = 2

_CPU = torch.device("cpu")
_cache: OrderedDict[str, torch.nn.Module] = OrderedDict()
_cache_lock = threading.Lock()


@dataclass(frozen=True)
class Scorer:
    """How a model's outputs become columns."""

    inputs: Inputs
    output_cols: tuple[str, ...]
    #: For each output: the numpy name of a scalar type, or VECTOR.
    output_types: tuple[str, ...]
    #: Vectors as Spark ML's struct, else as lists of float32.
    spark_vectors: bool
    #: Rows that go through the model at once.
    batch_size: int

    def arrow_types(self) -> list[Any]:
        """The Arrow type of each output column."""
        import pyarrow as pa

        vector = vector_type() if self.spark_vectors else pa.list_(pa.float32())
        return [vector if name == VECTOR else pa.from_numpy_dtype(name) for name in self.output_types]

    def score(self, model: torch.nn.Module, table: Any) -> list[Any]:
        """One Arrow array for each output, of as many rows as ``table`` (a RecordBatch or Table) has.

        Raises:
            DataError: a feature column is missing, holds nulls, or is none that the model takes.
        """
        import pyarrow as pa

        types = self.arrow_types()
        chunks: list[list[Any]] = [[] for _ in types]
        features = table.select(list(dict.fromkeys(self.inputs.feature_cols)))
        with torch.no_grad(), evaluating(model):
            for start in range(0, table.num_rows, self.batch_size):
                part = features.slice(start, self.batch_size)
                tensors = self.inputs.features(to_tensors(part, infer(part.schema)), _CPU)
                outputs = as_outputs(model(*tensors))
                for column, output, arrow_type in zip(chunks, outputs, types, strict=True):
                    column.append(self.to_column(output, part.num_rows, arrow_type))
        return [
            pa.concat_arrays(column) if column else pa.array([], type=arrow_type)
            for column, arrow_type in zip(chunks, types, strict=True)
        ]

    def score_rows(self, model: torch.nn.Module, predict_fn: Callable[..., Any], rows: list[Any]) -> list[Any]:
        """The same, one row at a time through a ``predict_fn(model, row)`` of the user's own."""
        import pyarrow as pa

        types = self.arrow_types()
        if not rows:
            return [pa.array([], type=arrow_type) for arrow_type in types]
        with torch.no_grad(), evaluating(model):
            predictions = [predict_fn(model, row) for row in rows]
        listed = [one if isinstance(one, (list, tuple)) else [one] for one in predictions]
        return [
            self.to_column(
                torch.stack([torch.as_tensor(one[index]).flatten() for one in listed]), len(rows), arrow_type
            )
            for index, arrow_type in enumerate(types)
        ]

    @staticmethod
    def to_column(output: torch.Tensor, rows: int, arrow_type: Any) -> Any:
        """An output of ``rows`` rows as an Arrow array."""
        if not output.dim() or len(output) != rows:
            raise DataError(
                f"the model returned {tuple(output.shape)} for {rows} rows: it must return one row for each"
            )
        return to_arrow(output, arrow_type)


@dataclass(frozen=True)
class ShippedModel:
    """A model on its way to the tasks of a cluster."""

    #: Hash of its bytes: what the cache goes by.
    key: str
    #: What :func:`hvd_cluster.spark.barrier.receive` takes.
    parcel: Any

    def load(self) -> torch.nn.Module:
        """The model, unpickled once in a process however many batches and jobs ask for it."""
        with _cache_lock:
            if self.key not in _cache:
                from hvd_cluster.spark.barrier import receive

                _cache[self.key] = cloudpickle.loads(receive(self.parcel))
                while len(_cache) > CACHED_MODELS:
                    _cache.popitem(last=False)
            _cache.move_to_end(self.key)
            return _cache[self.key]


def content_key(blob: bytes) -> str:
    """The key of a pickled model."""
    return hashlib.sha256(blob).hexdigest()


def score_batches(
    scorer: Scorer, shipped: ShippedModel, predict_fn: Callable[..., Any] | None, batches: Iterator[Any]
) -> Iterator[Any]:
    """The function that ``mapInArrow`` runs: every input column as it came, and the outputs behind them."""
    import pyarrow as pa

    model = shipped.load()
    for batch in batches:
        if predict_fn is None:
            outputs = scorer.score(model, batch)
        else:
            from hvd_cluster.estimators.spark_rows import rows_of

            outputs = scorer.score_rows(model, predict_fn, rows_of(batch))
        names = [*batch.schema.names, *scorer.output_cols]
        yield pa.RecordBatch.from_arrays([*batch.columns, *outputs], names=names)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and back in the modes that its parts were in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
