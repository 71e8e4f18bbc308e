"""``preprocess``: a user's function from a batch of columns to tensors, the same in training and in scoring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data.columns.raw_arrays import raw_array
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.tensors import to_tensors
from hvd_cluster.data.schema import WIDENED
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

BatchFormat = Literal["numpy", "pyarrow"]
OnError = Literal["raise", "skip", "null"]
BATCH_FORMATS: tuple[BatchFormat, ...] = ("numpy", "pyarrow")
ON_ERROR: tuple[OnError, ...] = ("raise", "skip", "null")

#: The name of what the function returns, unless it returns a dict or there is a single column.
UNNAMED = "features"


class _WrongResultError(DataError):
    """The function returned what no model can take."""


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

    def __call__(
        self, table: pa.Table, seeds: Sequence[int], place: Callable[[int], str]
    ) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.int64] | None]:
        """What the function makes of the rows of a table.

        Args:
            table: n >= 1 rows with the columns, and perhaps others.
            seeds: of the generator that the function gets.
            place: where row i comes from, for messages.

        Returns:
            Name -> CPU tensor with a row for each row of the table, and None; or, if rows were left out, with a row for
            each of the others, and the indices of these, shape (rows that are left,). All names are missing if none is
            left.

        Raises:
            DataError: the function raised (its exception is the cause), or returned something else than a row of
                numbers for each row.
        """
        rows = table.select(list(self.columns))
        try:
            return self._call(rows, seeds), None
        except _WrongResultError as error:
            raise _failure(f"{len(rows)} row(s) from {place(0)} on", error) from error
        except Exception as error:  # the user's own code, which may raise anything
            failed = self._failed_rows(rows, seeds)
            if not failed:  # no row by itself: the batch as a whole
                raise _failure(f"{len(rows)} rows from {place(0)} on", error) from error
            if self.on_error == "raise":
                row, cause = next(iter(failed.items()))
                raise _failure(place(row), cause) from cause
            if self.training and len(failed) == len(rows):
                raise _failure(f"all {len(rows)} rows of a batch, from {place(0)} on", failed[0]) from failed[0]
        kept = np.setdiff1d(np.arange(len(rows)), list(failed))
        try:
            return (self._call(rows.take(kept), seeds) if len(kept) else {}), kept
        except Exception as error:  # the user's own code, which may raise anything
            where = f"{len(kept)} rows from {place(int(kept[0]))} on, without {len(failed)} on which it fails"
            raise _failure(where, error) from error

    def _failed_rows(self, rows: pa.Table, seeds: Sequence[int]) -> dict[int, Exception]:
        """The rows on which the function fails one by one; only the first one if it ends everything."""
        failed: dict[int, Exception] = {}
        for row in range(len(rows)):
            try:
                self._call(rows.slice(row, 1), seeds)
            except Exception as error:  # noqa: BLE001 - the user's own code, which may raise anything
                failed[row] = error
                if self.on_error == "raise":
                    break
        return failed

    @functools.cached_property
    def _accepted(self) -> frozenset[str]:
        """The parameters of the function."""
        return frozenset(inspect.signature(self.fn).parameters)

    def _call(self, rows: pa.Table, seeds: Sequence[int]) -> dict[str, torch.Tensor]:
        batch: Any = rows
        if self.batch_format == "numpy":
            batch = {name: raw_array(rows.column(name)) for name in self.columns}
        options: dict[str, Any] = {"training": self.training} if "training" in self._accepted else {}
        if "rng" in self._accepted:
            options["rng"] = np.random.default_rng([seed & _UINT64 for seed in seeds])
        with torch.no_grad():
            made = self.fn(batch, **options)
        return dict(self._tensors(made, len(rows)))

    def _tensors(self, made: Any, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The function's result as tensors by name."""
        if isinstance(made, (load_pyarrow().Table, load_pyarrow().RecordBatch)):
            made = to_tensors(made)
        if not isinstance(made, Mapping):
            made = {self.columns[0] if len(self.columns) == 1 else UNNAMED: made}
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


def _failure(where: str, error: Exception) -> DataError:
    if isinstance(error, _WrongResultError):
        return DataError(f"preprocess failed on {where}: {error}")
    hint = ""
    if isinstance(error, KeyError):
        hint = "; it gets the feature columns only, because a fitted model has no others when it scores"
    return DataError(f"preprocess failed on {where}: {type(error).__name__}: {error}{hint}")


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
        return value.detach()
    if value is None:
        raise _WrongResultError(f"it returned None in {name!r}: return an array or a tensor, or leave the name out")
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, torch.Tensor) for one in value):
        tensors = [_tensor(name, one) for one in value]
        if len({tensor.shape for tensor in tensors}) > 1:
            raise _WrongResultError(_ragged(name, tensors))
        return torch.stack(tensors)
    if isinstance(value, (load_pyarrow().Array, load_pyarrow().ChunkedArray)):
        return to_tensors(load_pyarrow().table({name: value}))[name]
    if np.ma.is_masked(value):
        raise _WrongResultError(f"it returned a masked array in {name!r}: fill what is masked (array.filled(0))")
    array = _array(name, value)
    if array.dtype.kind not in "biuf":
        raise _WrongResultError(
            f"it returned {_described(array)} in {name!r}, of which no tensor can be made: return numbers; encode text "
            "and categories, and count times (array.astype('int64'))"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64_MAX:
        raise _WrongResultError(
            f"it returned {array.max()} in {name!r}, which int64 cannot hold: return it as float, or modulo a number"
        )
    widened = array.astype(WIDENED.get(array.dtype.name, array.dtype), copy=False)
    return torch.from_numpy(np.asarray(widened, order="C"))


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    """A list or an array, where rows are arrays of one shape, as one array."""
    try:
        array = np.asarray(value)
        if array.dtype == object and array.size:
            array = np.array(array.tolist())
    except ValueError as error:
        raise _WrongResultError(_ragged(name, value)) from error
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
