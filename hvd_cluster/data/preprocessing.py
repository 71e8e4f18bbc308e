"""``preprocess``: a user's function from a batch of columns to tensors.

It is the same in training and in scoring.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data.columns.arrow_values import without_dictionaries
from hvd_cluster.data.columns.raw_arrays import raw_array
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.tensors import to_tensors
from hvd_cluster.data.schema import WIDENED
from hvd_cluster.data.shared_objects import uses_objects
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

BatchFormat = Literal["numpy", "pyarrow"]
OnError = Literal["raise", "skip", "null"]
BATCH_FORMATS: tuple[BatchFormat, ...] = ("numpy", "pyarrow")
ON_ERROR: tuple[OnError, ...] = ("raise", "skip", "null")

#: The name of what the function returns, unless it returns a dict or there is a single column, for it alone: the first
#: that no label or weight has.
UNNAMED = ("features", "preprocessed")

#: Rows on each of which the function must fail for the same reason to say that it fails on every row.
_TRIED_ROWS = 3


class AllRowsFailedError(DataError):
    """The function failed on each row of a batch.

    Rows on which it fails are left out.
    """


class RowFailedError(DataError):
    """The function failed on a row, and a row on which it fails ends everything."""


class _WrongResultError(DataError):
    """The function returned what no model can take."""


class _RaggedError(_WrongResultError):
    """The rows that it returned differ in shape, or some are missing."""


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """A function over batches, and how it is called. It can be pickled if ``fn`` can."""

    #: Called with a batch of ``columns``; ``training=`` and ``rng=`` are passed if its signature has them.
    fn: Callable[..., Any]
    #: The columns that it gets, and no others.
    columns: tuple[str, ...]
    #: "numpy": a dict of arrays (see :func:`hvd_cluster.data.columns.raw_arrays.raw_array`); "pyarrow": a table.
    batch_format: BatchFormat = "numpy"
    #: What becomes of rows on which it raises: "raise" ends the fit or the scoring; "skip" and "null" leave them out.
    on_error: OnError = "raise"
    #: The value of ``training=``.
    training: bool = False
    #: The names that it must return, as it did for the rows that the model was tried on; None for any.
    made: tuple[str, ...] | None = None
    #: The columns that batches have as tensors too: labels and weights.
    shared: tuple[str, ...] = ()

    @property
    def raw(self) -> tuple[str, ...]:
        """The columns that may hold anything, since only the function gets them."""
        return tuple(name for name in self.columns if name not in self.shared)

    def __call__(
        self, table: pa.Table, seeds: Sequence[int], place: Callable[[int], str]
    ) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.int64] | None]:
        """What the function makes of the rows of a table.

        Args:
            table: n >= 1 rows with the columns, and perhaps others.
            seeds: of the generator that the function gets.
            place: where row i comes from, for messages.

        Returns:
            Name -> CPU tensor in memory of its own, with a row for each row of the table, and None; or, if rows were
            left out, with a row for each of the others, and the indices of these, shape (rows that are left,).

        Raises:
            AllRowsFailedError: no row would be left.
            RowFailedError: the function failed on a row, and not on every row tried.
            DataError: the function raised (its exception is the cause), or returned something else than a row of
                numbers for each row.
        """
        # Rows that a fit wrote hold no dictionaries, unlike Parquet that it read where it is, and unlike pandas.
        rows = without_dictionaries(table.select(list(self.columns)))
        try:
            return self._call(rows, seeds), None
        except Exception as error:  # the user's own code, which may raise anything
            failed: Mapping[int, Exception] = {}
            if isinstance(error, _RaggedError):
                failed = self._odd_rows(rows, seeds)
            elif not isinstance(error, _WrongResultError):
                failed = self._failed_rows(rows, seeds)
            if not failed:  # no row by itself: the batch as a whole
                raise _failure(f"{len(rows)} row{'s' * (len(rows) > 1)} from {place(0)} on", error) from error
            if self.on_error == "raise":
                row, cause = next(iter(failed.items()))
                if len(failed) > 1 and len({repr(one) for one in failed.values()}) == 1:
                    raise _failure(None, cause) from cause
                raise _failure(place(row), cause, RowFailedError) from cause
            if len(failed) == len(rows):
                where = f"all {len(rows)} rows of a batch, from {place(0)} on"
                raise _failure(where, failed[0], AllRowsFailedError) from failed[0]
        kept = np.setdiff1d(np.arange(len(rows)), list(failed))
        try:
            return self._call(rows.take(kept), seeds), kept
        except Exception as error:  # the user's own code, which may raise anything
            where = f"{len(kept)} rows from {place(int(kept[0]))} on, without {len(failed)} on which it fails"
            raise _failure(where, error) from error

    def _failed_rows(self, rows: pa.Table, seeds: Sequence[int]) -> dict[int, Exception]:
        """The rows on which the function fails one by one.

        If one ends everything, it is the only one; but the first rows are several if the function fails on each.
        """
        failed: dict[int, Exception] = {}
        for row in range(len(rows)):
            try:
                self._call(rows.slice(row, 1), seeds)
            except Exception as error:  # noqa: BLE001 - the user's own code, which may raise anything
                failed[row] = error
            if self.on_error == "raise" and failed and (len(failed) <= row or len(failed) == _TRIED_ROWS):
                break
        return failed

    def _odd_rows(self, rows: pa.Table, seeds: Sequence[int]) -> dict[int, Exception]:
        """The rows whose results are not of the shape that most rows have."""
        failed: dict[int, Exception] = {}
        shapes: dict[int, tuple[Any, ...]] = {}
        for row in range(len(rows)):
            try:
                made = self._call(rows.slice(row, 1), seeds)
                shapes[row] = tuple((name, tuple(tensor.shape[1:])) for name, tensor in made.items())
            except Exception as error:  # noqa: BLE001 - the user's own code, which may raise anything
                failed[row] = error
        usual = Counter(shapes.values()).most_common(1)
        for row, found in shapes.items():
            if found != usual[0][0]:
                text = f"it returned {_shapes_text(found)}, and {_shapes_text(usual[0][0])} for most other rows"
                failed[row] = _WrongResultError(f"{text}: give them one shape within a batch")
        return dict(sorted(failed.items()))

    def copied(self) -> Preprocess | None:
        """A copy that another thread can call at the same time; None if there is none.

        Functions that are imported from a module are not copied. They can be called by several threads unless they use
        objects of modules: see :func:`hvd_cluster.data.shared_objects.uses_objects`.
        """
        try:
            fn = cloudpickle.loads(cloudpickle.dumps(self.fn))
        except Exception:  # noqa: BLE001 - whatever its objects raise when they are pickled
            return None
        return None if fn is self.fn and uses_objects(fn) else dataclasses.replace(self, fn=fn)

    @functools.cached_property
    def _accepted(self) -> frozenset[str]:
        """The parameters of the function."""
        parameters = inspect.signature(self.fn).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        return frozenset({*parameters, "training", "rng"} if takes_any else parameters)

    def _call(self, rows: pa.Table, seeds: Sequence[int]) -> dict[str, torch.Tensor]:
        batch: Any = rows
        if self.batch_format == "numpy":
            batch = {name: raw_array(rows.column(name)) for name in self.columns}
        options: dict[str, Any] = {"training": self.training} if "training" in self._accepted else {}
        if "rng" in self._accepted:
            options["rng"] = np.random.default_rng([seed & _UINT64 for seed in seeds])
        with torch.no_grad():
            made = self.fn(batch, **options)
        found = dict(self._tensors(made, len(rows)))
        if self.made is not None and set(found) != set(self.made):
            raise _WrongResultError(
                f"it returned {', '.join(map(repr, found))}, but {', '.join(map(repr, self.made))} for the rows that "
                "the model was tried on: return the same names for all batches"
            )
        return found

    def _tensors(self, made: Any, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The function's result as tensors by name."""
        if isinstance(made, (load_pyarrow().Table, load_pyarrow().RecordBatch)):
            made = to_tensors(made)
        if not isinstance(made, Mapping):
            free = [name for name in UNNAMED if name not in self.shared] or UNNAMED
            name = self.columns[0] if len(self.columns) == 1 and self.raw else free[0]
            made = {self.made[0] if self.made is not None and len(self.made) == 1 else name: made}
        if not made:
            raise _WrongResultError("it returned an empty dict: return an array, a tensor, or a dict of them")
        for name, value in made.items():
            if not isinstance(name, str):
                raise _WrongResultError(f"it returned the key {name!r}: names are strings")
            tensor = _tensor(name, value)
            if not tensor.dim() or len(tensor) != rows:
                raise _WrongResultError(
                    f"it returned shape {tuple(tensor.shape)} in {name!r} for a batch of {rows} row(s): the first "
                    "dimension must be that of the batch"
                )
            yield name, tensor


_UINT64, _INT64_MAX = (1 << 64) - 1, (1 << 63) - 1


def _failure(where: str | None, error: Exception, kind: type[DataError] = DataError) -> DataError:
    """The error for rows of a place; None: for every row tried."""
    failed = "preprocess fails on every row tried" if where is None else f"preprocess failed on {where}"
    if isinstance(error, _WrongResultError):
        return kind(f"{failed}: {error}")
    hint = ""
    if isinstance(error, KeyError):
        hint = "; it gets the feature columns only, because a fitted model has no others when it scores"
    return kind(f"{failed}: {type(error).__name__}: {error}{_line_of(error)}{hint}")


def _line_of(error: Exception) -> str:
    """The innermost line of the function's file in an error, in parentheses.

    Empty if the exception came through none.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    below = [place for place in places if place[0] != __file__]
    lines = [line for file, line in below if file == below[0][0]]
    return f" ({Path(below[0][0]).name}:{lines[-1]})" if lines else ""


def _shapes_text(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"shape {shape} in {name!r}" for name, shape in shapes)


def _tensor(name: str, value: Any) -> torch.Tensor:
    """One value of the function's result."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise _WrongResultError(
                f"it returned a tensor on {value.device} in {name!r}: return CPU tensors, which are moved to the "
                "model's device"
            )
        if value.layout != torch.strided or value.is_nested:
            raise _WrongResultError(f"it returned a sparse or nested tensor in {name!r}: return dense ones, to_dense()")
        return value.detach().clone()
    if value is None:
        raise _WrongResultError(f"it returned None in {name!r}: return an array or a tensor, or leave the name out")
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, torch.Tensor) for one in value):
        tensors = [_tensor(name, one) for one in value]
        if len({tensor.shape for tensor in tensors}) > 1:
            raise _RaggedError(_ragged(name, tensors))
        return torch.stack(tensors)
    if isinstance(value, (load_pyarrow().Array, load_pyarrow().ChunkedArray)):
        return to_tensors(load_pyarrow().table({name: value}))[name]
    if np.ma.is_masked(value):
        raise _WrongResultError(f"it returned a masked array in {name!r}: fill what is masked (array.filled(0))")
    array = _array(name, value)
    if array.dtype.kind not in "biuf":
        raise (_RaggedError if array.dtype == object else _WrongResultError)(
            f"it returned {_described(array)} in {name!r}, of which no tensor can be made: return numbers; encode text "
            "and categories, and count times (array.astype('int64'))"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64_MAX:
        raise _WrongResultError(
            f"it returned {array.max()} in {name!r}, which int64 cannot hold: return it as float, or modulo a number"
        )
    # A copy: the function may return the same array again, or the memory of its input.
    return torch.from_numpy(np.array(array, dtype=WIDENED.get(array.dtype.name, array.dtype), order="C"))


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    """A list or an array, where rows are arrays of one shape, as one array."""
    try:
        array = np.asarray(value)
        if array.dtype == object and array.size:
            array = np.array(array.tolist())
    except ValueError as error:
        raise _RaggedError(_ragged(name, value)) from error
    return array


def _ragged(name: str, rows: Any) -> str:
    """The error for rows that do not have one shape."""
    try:
        shapes = sorted({tuple(np.shape(row)) for row in rows})
        such = f", such as {shapes[0]} and {shapes[-1]}"
    except ValueError:
        such = ", or lists of different lengths within a row"
    return f"it returned rows of different shapes in {name!r}{such}: pad or cut them to one shape within a batch"


def _described(array: npt.NDArray[Any]) -> str:
    is_object = array.dtype == object and bool(array.size)
    return f"values of type {type(array.flat[0]).__name__}" if is_object else str(array.dtype)
