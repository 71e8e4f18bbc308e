"""Reads, filters, decodes and transforms a fragment, in a reader's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.reading.row_transform import as_array, as_dtype
from hvd_cluster.data.reading.shards import permutation
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.cache import LocalDiskCache
from hvd_cluster.petastorm.codecs import fits
from hvd_cluster.petastorm.columns import decoded, objects, plain
from hvd_cluster.petastorm.fragments import Fragment
from hvd_cluster.petastorm.predicates import PredicateBase
from hvd_cluster.petastorm.transform import TransformSpec
from hvd_cluster.petastorm.unischema import Unischema


@dataclass(frozen=True)
class RowBatch:
    """Rows, column by column."""

    #: Field name -> n values; on their way through a loader tensors too.
    columns: dict[str, Any]
    #: n.
    rows: int


@dataclass(frozen=True, kw_only=True)
class FragmentDecoder:
    """What is done to every fragment. Several threads may use it at once."""

    #: Reads the columns of ``schema`` and of the predicate, filtered.
    tables: RowGroupTables
    #: Columns that only the names of folders hold, and their Arrow types.
    folder_types: Mapping[str, Any]
    #: The fields that are read, before the transform; and all fields, for the predicate.
    schema: Unischema
    whole_schema: Unischema
    #: The fields that are given.
    output: Unischema
    #: Whether the stored values are to be decoded by their codecs, row by row transformed, or are a batch as they are.
    decode: bool
    predicate: PredicateBase | None = None
    transform: TransformSpec | None = None
    #: What ``tables`` keeps on disk, if anything.
    cache: LocalDiskCache | None = None

    def cleanup(self) -> None:
        """Empty the cache."""
        if self.cache is not None:
            self.cache.cleanup()

    def folder_values(self, fragment: Fragment) -> dict[str, Any]:
        """The decoded values of the columns that only folders name."""
        pyarrow, values = load_pyarrow(), dict(fragment.row_group.partition)
        return {
            name: decoded(pyarrow.array([values[name]], arrow_type), self.whole_schema.fields[name])[0]
            for name, arrow_type in self.folder_types.items()
            if name in self.whole_schema.fields
        }

    def read(self, fragment: Fragment, row_seeds: tuple[int, ...] | None, stopped: Callable[[], bool]) -> RowBatch:
        """The rows of a fragment.

        Args:
            fragment: what to read.
            row_seeds: of the permutation of its rows; None keeps their order.
            stopped: returns whether the rows are no longer wanted.
        """
        start, stop = fragment.bounds
        table = self.tables.matching(fragment.row_group, start, stop if fragment.num_slices > 1 else None)
        try:
            if self.predicate is not None:
                table = table.filter(load_pyarrow().array(self._mask(table, self.predicate)))
            if row_seeds is not None:
                table = table.take(load_pyarrow().array(permutation(table.num_rows, row_seeds)))
            if stopped() or not table.num_rows:
                return RowBatch({}, 0)
            return self._rows(table, stopped) if self.decode else self._batch(table)
        except DataError as error:
            raise type(error)(f"in {fragment.row_group.place}: {error}") from error

    def _mask(self, table: Any, predicate: PredicateBase) -> Any:
        names = sorted(predicate.get_fields())
        if not self.decode:
            mask = np.asarray(predicate.include_batch(table.select(names)), dtype=bool)
            if mask.shape != (table.num_rows,):
                raise DataError(
                    f"the predicate answered with shape {mask.shape} for {table.num_rows} rows: with make_batch_reader "
                    "it gets a DataFrame and returns one bool a row"
                )
            return mask
        columns = [decoded(table.column(name), self.whole_schema.fields[name]) for name in names]
        rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        return np.fromiter((bool(predicate.do_include(row)) for row in rows), dtype=bool, count=table.num_rows)

    def _rows(self, table: Any, stopped: Callable[[], bool]) -> RowBatch:
        columns = {name: decoded(table.column(name), field) for name, field in self.schema.fields.items()}
        if self.transform is None or self.transform.func is None:
            return RowBatch({name: columns[name] for name in self.output.fields}, table.num_rows)
        made: dict[str, list[Any]] = {name: [] for name in self.output.fields}
        for row in zip(*columns.values(), strict=True):
            if stopped():
                return RowBatch({}, 0)
            answer = self.transform.func(dict(zip(columns, row, strict=True)))
            if not hasattr(answer, "keys"):  # a pandas Series will do
                raise _not_returned(answer, "the row as a dict")
            for name, values in made.items():
                if name not in answer:
                    raise DataError(f"the transform's row lacks the field {name!r}: it has {list(answer)}")
                values.append(answer[name])
        return RowBatch(dict(made), table.num_rows)

    def _batch(self, table: Any) -> RowBatch:
        if self.transform is None or self.transform.func is None:
            return RowBatch({name: plain(table.column(name)) for name in self.output.fields}, table.num_rows)
        frame = self.transform.func(table.select(list(self.schema.fields)).to_pandas())
        if not hasattr(frame, "columns"):
            raise _not_returned(frame, "the DataFrame")
        missing = [name for name in self.output.fields if name not in frame.columns]
        if missing:
            raise DataError(f"the transform's DataFrame lacks the fields {missing}: it has {list(frame.columns)}")
        edited = {name for name, *_ in self.transform.edit_fields}
        columns = {name: _of_series(frame[name], field, name in edited) for name, field in self.output.fields.items()}
        return RowBatch(columns, len(frame)) if len(frame) else RowBatch({}, 0)


def _not_returned(answer: Any, what: str) -> DataError:
    return DataError(
        f"the transform's func returned {type(answer).__name__}: it must return {what}, also if it changes what it is "
        "given in place; a predicate leaves rows out"
    )


def _of_series(series: Any, field: Any, is_edited: bool) -> Any:
    """A column of the user's DataFrame, as the transform's edit_fields declare it.

    One that they do not declare keeps its dtype where it has values that the field's dtype cannot hold: pandas holds
    integers with nulls as floating-point numbers with NaN.
    """
    values = series.to_numpy(copy=True)
    if values.dtype != object:
        fits = field.shape or values.dtype.kind not in "biuf" or not _is_number(field)
        return values if fits else _in_dtype(values, field, is_edited)
    first = next((value for value in values if value is not None), None)
    if isinstance(first, (np.ndarray, list, tuple, torch.Tensor)):
        if any(value is None for value in values):
            return objects(values)
        rows = [as_array(value) if isinstance(value, torch.Tensor) else np.asarray(value) for value in values]
        if any(row.shape != rows[0].shape for row in rows):
            return objects(rows)
        stacked = np.stack(rows)
        if None not in field.shape and stacked[0].size == int(np.prod(field.shape)):
            stacked = stacked.reshape(len(rows), *field.shape)
        elif is_edited and len(field.shape) > 1:  # petastorm does not compare the lengths of lists
            stacked = _in_shape(stacked, field)
        return _in_dtype(stacked, field, is_edited) if _is_number(field) and stacked.dtype.kind in "biufc" else stacked
    if isinstance(first, str) and None not in values:
        return np.array(values.tolist(), dtype=np.str_)
    return values


def _in_shape(stacked: Any, field: Any) -> Any:
    lengths = tuple(None if length == -1 else length for length in field.shape)  # users write both for any length
    if fits(stacked.shape[1:], lengths):
        return stacked
    try:
        return stacked.reshape(len(stacked), *(-1 if length is None else length for length in lengths))
    except ValueError:
        raise DataError(
            f"the transform's column {field.name!r} has rows of shape {stacked.shape[1:]}, but edit_fields declares "
            f"{field.shape}"
        ) from None


def _in_dtype(values: Any, field: Any, is_edited: bool) -> Any:
    converted = as_dtype(values, field.numpy_dtype)
    if converted is None and is_edited:
        raise DataError(
            f"the transform's column {field.name!r} has nulls, or numbers out of the range of "
            f"{np.dtype(field.numpy_dtype)}, which edit_fields declares: fill them, or declare another dtype"
        )
    return values if converted is None else converted


def _is_number(field: Any) -> bool:
    try:
        return np.dtype(field.numpy_dtype).kind in "biufc"
    except TypeError:
        return False
