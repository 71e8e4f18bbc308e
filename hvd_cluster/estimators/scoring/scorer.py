"""Scores Arrow batches: one column for each output.

This module and what it imports are copied into models for MLflow, which score where this package is not installed: see
:mod:`hvd_cluster.estimators.logged_model.sources`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data.columns.arrow_values import without_dictionaries
from hvd_cluster.data.columns.vectors import vector_type
from hvd_cluster.data.preprocessing import AllRowsFailedError, Preprocess, RowFailedError
from hvd_cluster.data.reading.row_transform import RowTransform, apply
from hvd_cluster.data.reading.tensors import to_arrow, to_tensors
from hvd_cluster.data.schema import ColumnKind, Schema, infer
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.scoring.output_columns import ARRAY, VECTOR, OutputColumn
from hvd_cluster.estimators.spec import Inputs, error_text, shapes_text

_CPU = torch.device("cpu")
_ON_ERROR_TEXT = (
    'on_error="null" gives rows on which preprocess fails null outputs, and "skip" leaves them out: call '
    'model.setOnError("null"), see docs/raw-columns.md'
)


@dataclass(frozen=True)
class Framework:
    """How to call a framework's models; both functions are importable, to be pickled."""

    #: (model, CPU tensors of its features) -> one CPU tensor for each output, without gradients.
    predict: Callable[[Any, Any], Sequence[torch.Tensor]]
    #: A context in which the model is in inference mode.
    mode: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    #: (inputs, model, what preprocess returned) -> the inputs with the model's arguments.
    with_arguments: Callable[[Inputs, Any, Mapping[str, torch.Tensor]], Inputs] | None = None


@dataclass(frozen=True)
class Arguments:
    """What a model is called with for some rows."""

    inputs: Inputs
    #: Argument -> tensor of shape (rows, ...); empty if no row is left.
    tensors: Mapping[str, torch.Tensor]
    #: The columns that they come from, if they are columns.
    schema: Schema
    #: The rows that are left, if ``preprocess`` failed on some.
    kept: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Scored:
    """What the rows of a table were scored with."""

    #: One Arrow array for each output column.
    columns: list[Any]
    #: The rows of the table that they are for, shape (rows of each array,); None for all.
    kept: npt.NDArray[np.int64] | None = None

    def of(self, data: Any) -> Any:
        """The rows of an Arrow table or batch that have outputs."""
        return data if self.kept is None else data.take(self.kept)


@dataclass(frozen=True)
class Scorer:
    """How a model's outputs become columns."""

    framework: Framework
    inputs: Inputs
    columns: tuple[OutputColumn, ...]
    #: Unit of each feature that held times in training, "" for others; () if unknown.
    feature_units: tuple[str, ...]
    #: Write vectors as Spark ML's struct, else as lists of float32.
    spark_vectors: bool
    #: Rows per call of the model.
    batch_size: int
    #: Arrow type of each feature column in training, where known.
    types: Mapping[str, Any] = field(default_factory=dict)
    #: Makes the model's arguments of the feature columns.
    preprocess: Preprocess | None = None
    #: Makes the feature columns of each row, from those of the data.
    transformation_fn: RowTransform | None = None

    def arrow_types(self) -> list[Any]:
        """The Arrow type of each output column."""
        import pyarrow as pa

        array = pa.list_(pa.float32())
        special = {VECTOR: vector_type() if self.spark_vectors else array, ARRAY: array}
        return [special.get(column.type) or pa.from_numpy_dtype(column.type) for column in self.columns]

    def score(self, model: Any, table: Any) -> Scored:
        """The output columns of the rows of ``table`` (a RecordBatch or Table).

        Raises:
            DataError: a feature column is missing or holds nulls, ``preprocess`` failed, or the model cannot take its
                arguments.
        """
        import pyarrow as pa

        types = self.arrow_types()
        chunks: list[list[Any]] = [[] for _ in types]
        rows: list[npt.NDArray[np.int64]] = []
        features = table.select(list(dict.fromkeys(self.inputs.feature_cols)))
        with self.framework.mode(model):
            for start in range(0, table.num_rows, self.batch_size):
                part = features.slice(start, self.batch_size)
                arrays, kept = self._score_part(model, part, start, types)
                rows.append(start + (np.arange(part.num_rows) if kept is None else kept))
                for chunk, array in zip(chunks, arrays, strict=True):
                    chunk.append(array)
        columns = [
            pa.concat_arrays(chunk) if chunk else pa.array([], type=arrow_type)
            for chunk, arrow_type in zip(chunks, types, strict=True)
        ]
        all_kept = np.concatenate(rows) if rows else np.arange(0)
        return Scored(columns, None if len(all_kept) == table.num_rows else all_kept)

    def _score_part(
        self, model: Any, part: Any, start: int, types: Sequence[Any]
    ) -> tuple[list[Any], npt.NDArray[np.int64] | None]:
        """The output columns of some rows, and the rows that they are for; None for all."""
        import pyarrow as pa

        found = self.arguments_of(model, part, start)
        kept = found.kept
        if kept is not None and not len(kept):
            arrays = [pa.array([], type=arrow_type) for arrow_type in types]
        else:
            count = part.num_rows if kept is None else len(kept)
            arrays = self._to_arrays(self.outputs(model, found), count, types)
        if kept is None or self.preprocess is None or self.preprocess.on_error == "skip":
            return arrays, kept
        places = np.full(part.num_rows, -1)
        places[kept] = np.arange(len(kept))
        indices = pa.array(places, mask=places < 0)
        return [array.take(indices) for array in arrays], None

    def arguments_of(self, model: Any, part: Any, start: int = 0) -> Arguments:
        """The model's arguments, of some rows of the feature columns.

        Args:
            part: an Arrow table or batch.
            start: number of the first row, for messages.

        Raises:
            DataError: a column is missing or holds nulls, or ``preprocess`` failed.
        """
        part = self._as_trained(part)
        if self.preprocess is not None:
            try:
                made, kept = self.preprocess(part, (start,), lambda row: f"row {start + row} of the rows to score")
            except AllRowsFailedError:
                return Arguments(self.inputs, {}, Schema(()), np.arange(0))
            except RowFailedError as error:
                raise DataError(f"{error}\n{_ON_ERROR_TEXT}") from error.__cause__
            inputs = self.inputs
            if inputs.made is None:  # the model was not made by a fit
                assert self.framework.with_arguments is not None
                inputs = self.framework.with_arguments(inputs, model, made)
            return Arguments(inputs, made, Schema(()), kept)
        schema = self._in_trained_units(infer(part.schema))
        if self.transformation_fn is None:
            return Arguments(self.inputs, to_tensors(part, schema), schema)
        fn = functools.partial(_features_of, self.transformation_fn, self.inputs.feature_cols)
        return Arguments(self.inputs, self._transformed(fn, part, schema, f"the rows from {start} on"), schema)

    def _transformed(self, fn: RowTransform, part: Any, schema: Schema, place: str) -> dict[str, torch.Tensor]:
        """The feature columns that a function makes of some rows.

        Where the model takes floats, an int in the first row does not decide: training learned from another row.
        """
        _, first = apply(fn, part.slice(0, 1), schema, None, place)
        dtypes = dict(zip(self.inputs.feature_cols, self.inputs.feature_dtypes, strict=True))
        columns = (
            replace(column, dtype="float64") if getattr(torch, dtypes[column.name]).is_floating_point else column
            for column in first
        )
        return apply(fn, part, schema, Schema(tuple(columns)), place)[0]

    def _as_trained(self, part: Any) -> Any:
        """The columns as a table, in the Arrow types of the training.

        Dates and arrays of pandas and MLflow are of other types.
        """
        import pyarrow as pa

        table = without_dictionaries(pa.Table.from_batches([part]) if isinstance(part, pa.RecordBatch) else part)
        for index, name in enumerate(table.column_names):
            wanted = self.types.get(name)
            if wanted is not None and wanted != table.column(index).type:
                with contextlib.suppress(pa.ArrowException):  # other values than in the training: scored as they are
                    given = _in_zone(table.column(index), wanted)
                    cast = given.cast(wanted)
                    # Arrow takes a cast for safe that gives a time its date, or a number that of a decimal or a bool.
                    if not _may_round(given.type, wanted) or cast.cast(given.type).equals(given):
                        table = table.set_column(index, name, cast)
        return table

    def outputs(self, model: Any, arguments: Arguments) -> Sequence[torch.Tensor]:
        """The model's outputs, each a tensor with a row for each row of the arguments.

        Raises:
            DataError: the model failed.
        """
        inputs, tensors, schema = arguments.inputs, arguments.tensors, arguments.schema
        inputs.checked(tensors)
        try:
            return self.framework.predict(model, inputs.features(tensors, _CPU))
        except Exception as error:  # the user's model may raise anything
            what = "the feature columns" if inputs.made is None else "what preprocess returned"
            text = f"the model failed on {what}: {error_text(error)}"
            raise DataError(f"{text}\n{shapes_text(inputs, tensors, schema)}") from error

    def _in_trained_units(self, schema: Schema) -> Schema:
        """The schema with times in training units: those of pandas and Spark differ."""
        trained = dict(zip(self.inputs.feature_cols, self.feature_units, strict=False))
        return Schema(
            tuple(
                replace(column, unit=trained.get(column.name) or column.unit)
                if column.kind is ColumnKind.TIME
                else column
                for column in schema
            )
        )

    def appended(self, scored: Scored, table: Any) -> Any:
        """The rows of an Arrow table that have outputs, with these as further columns."""
        table = scored.of(table)
        for column, values in zip(self.columns, scored.columns, strict=True):
            table = table.append_column(column.name, values)
        return table

    def score_rows(self, model: Any, predict_fn: Callable[..., Any], rows: list[Any]) -> list[Any]:
        """The same, row by row through the user's ``predict_fn(model, row)``."""
        import pyarrow as pa

        types = self.arrow_types()
        if not rows:
            return [pa.array([], type=arrow_type) for arrow_type in types]
        with torch.no_grad(), self.framework.mode(model):
            predictions = [predict_fn(model, row) for row in rows]
        listed = [one if isinstance(one, (list, tuple)) else [one] for one in predictions]
        outputs = [
            torch.stack([torch.as_tensor(one[index]).flatten() for one in listed]) for index in range(len(listed[0]))
        ]
        return self._to_arrays(outputs, len(rows), types)

    def _to_arrays(self, outputs: Sequence[torch.Tensor], rows: int, types: Sequence[Any]) -> list[Any]:
        """The outputs of ``rows`` rows as Arrow arrays."""
        for output in outputs:
            if not output.dim() or len(output) != rows:
                raise DataError(
                    f"the model returned {tuple(output.shape)} for {rows} rows: it must return one row for each"
                )
        if len(outputs) <= max(column.output for column in self.columns):
            raise DataError(f"the model returned {len(outputs)} outputs, fewer than there are label columns")
        return [
            _to_array(column, outputs[column.output], arrow_type)
            for column, arrow_type in zip(self.columns, types, strict=True)
        ]


def _features_of(transform: RowTransform, names: Sequence[str], row: dict[str, Any]) -> Any:
    made: Any = transform(row)
    return {name: made[name] for name in names if name in made} if isinstance(made, Mapping) else made


def types_of(fields: Iterable[Any]) -> dict[str, Any]:
    """The Arrow type of each field by name; of dictionaries that of the values."""
    return {each.name: each.type.value_type if hasattr(each.type, "index_type") else each.type for each in fields}


def _in_zone(given: Any, wanted: Any) -> Any:
    """Zoneless timestamps in ``wanted``'s zone, if any; Spark's toPandas() drops it.

    Of the hour that a clock shows twice it is the first; times that a clock leaves out become the next one.
    """
    import pyarrow.compute as compute
    import pyarrow.types as types

    zones = [one.tz if types.is_timestamp(one) else "" for one in (given.type, wanted)]
    if zones[0] is not None or not zones[1]:
        return given
    return compute.assume_timezone(given, zones[1], ambiguous="earliest", nonexistent="latest")


def _may_round(given: Any, wanted: Any) -> bool:
    """Whether a cast of numbers, times or lists may change digits other than floats'."""
    import pyarrow.types as types

    while hasattr(given, "value_type") and hasattr(wanted, "value_type"):
        given, wanted = given.value_type, wanted.value_type
    return (types.is_primitive(given) or types.is_decimal(given)) and not types.is_floating(wanted)


def _to_array(column: OutputColumn, output: torch.Tensor, arrow_type: Any) -> Any:
    values = column.values(output)
    try:
        return to_arrow(values, arrow_type)
    except DataError as error:
        remedy = "its type is that of the label; setOutputKinds(['array']), or another kind, keeps the numbers"
        raise DataError(f"output column {column.name!r}: {error}; {remedy}") from error
