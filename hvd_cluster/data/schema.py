"""What the columns of a data set hold, found out from Arrow types.

That is the name, kind, element type and shape per row.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hvd_cluster.data.columns.arrow_values import is_bytes, is_text
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

#: In a shape: a length that the type does not have, with no row seen yet.
UNKNOWN = -1

#: torch has few operations on unsigned integers wider than a byte, so these columns come as the next signed type.
WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


class ColumnKind(enum.Enum):
    """What a column holds."""

    NUMERIC = "numeric"
    BOOL = "bool"
    STRING = "string"
    BINARY = "binary"
    #: A timestamp, a date or a duration; tensors hold the count of its ``Column.unit`` (timestamps since 1970).
    TIME = "time"
    #: Numbers in a fixed shape, from lists of any nesting.
    LIST = "list"
    #: A Spark ML vector, dense or sparse; tensors of it are dense.
    VECTOR = "vector"
    #: Anything, which only a function of the user's can use.
    OTHER = "other"


_WITHOUT_TENSOR = frozenset({ColumnKind.STRING, ColumnKind.BINARY, ColumnKind.OTHER})


@dataclass(frozen=True)
class Column:
    """One column.

    A tensor of n rows has shape ``(n, *shape)`` and the torch dtype named ``dtype``.
    """

    #: The column's name in the data.
    name: str
    #: What it holds.
    kind: ColumnKind
    #: numpy name of an element of its tensors, e.g. "float32"; "str", "bytes" and "object" have no tensors.
    dtype: str
    #: Shape of one row; () for scalars; UNKNOWN (-1) where no row has been seen yet.
    shape: tuple[int, ...] = ()
    #: What a time is counted in: "D", "s", "ms", "us" or "ns"; "" for everything else.
    unit: str = ""

    @classmethod
    def raw(cls, name: str) -> Column:
        """A column that is kept as it is stored, whatever it holds."""
        return cls(name, ColumnKind.OTHER, "object")

    @property
    def has_tensor(self) -> bool:
        """Whether rows of it can be stacked into a tensor as they are."""
        return self.kind not in _WITHOUT_TENSOR

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a tensor; 0 where that is not known.

        It is not for strings, binary and unseen shapes.
        """
        if not self.has_tensor or UNKNOWN in self.shape:
            return 0
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Schema:
    """The columns of a data set, in order."""

    #: The columns; their names differ.
    columns: tuple[Column, ...]

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise DataError(missing_columns_text([name], self.names))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(column.name for column in self.columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all columns whose size is known."""
        return sum(column.row_bytes for column in self.columns)

    def select(self, names: Sequence[str]) -> Schema:
        """The named columns, in the order of ``names``."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise DataError(missing_columns_text(missing, self.names))
        return Schema(tuple(self[name] for name in names))

    def as_float32(self) -> Schema:
        """The same columns, float64 ones as float32."""
        return Schema(tuple(replace(c, dtype="float32") if c.dtype == "float64" else c for c in self.columns))

    def require_tensors(self) -> None:
        """Check that every column can become a tensor as it is."""
        if text := self.no_tensors_text():
            raise DataError(text)

    def no_tensors_text(self, others: Collection[str] = ()) -> str:
        """What to say of columns that cannot become tensors as they are; or empty.

        Those in ``others`` are left out.
        """
        columns = (column for column in self.columns if not column.has_tensor and column.name not in others)
        texts = [f"{column.name!r} ({column.kind.value})" for column in columns]
        if not texts:
            return ""
        them = "them" if len(texts) > 1 else "it"
        return (
            f"no tensor can be made of {_columns(texts)}: leave {them} out; encode {them} as numbers before, as labels "
            f"must be (Spark has StringIndexer); or turn {them} into numbers on the workers, as preprocess=fn of an "
            "estimator does for its features, or a transformation_fn or a decode function of a reader"
        )


def no_tensor_type_text(name: str, type_name: str) -> str:
    """What to say of a column of that type."""
    return (
        f"column {name!r} has the type {type_name}, which no tensor can hold: cast it to numbers, strings, binary, "
        "arrays of numbers or Spark ML vectors, leave it out, or give an estimator a preprocess=fn that takes it"
    )


def missing_columns_text(missing: Sequence[str], existing: Sequence[str], of: str = "the columns") -> str:
    """A line per missing column with its near misses, then all columns there are.

    ``of`` names the latter.
    """
    import difflib

    lines = []
    by_lower = {name.lower(): name for name in existing}
    for name in missing:
        lower = str(name).lower()
        close = [lower] if lower in by_lower else difflib.get_close_matches(lower, list(by_lower), n=3, cutoff=0.6)
        near = [by_lower[other] for other in close]
        hint = f"; did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
        lines.append(f"there is no column {name!r}{hint}")
    listed = ", ".join(repr(name) for name in existing) or "none"
    return "\n".join([*lines, f"{of} are: {listed}"])


def infer(
    arrow_schema: pa.Schema,
    columns: Sequence[str] | None = None,
    decoded: Collection[str] = (),
    wrong: list[str] | None = None,
    raw: Collection[str] = (),
) -> Schema:
    """The schema for an Arrow schema.

    List and vector lengths that it leaves open are UNKNOWN.

    Args:
        arrow_schema: a ``pyarrow.Schema``.
        columns: the columns to take, in that order; None for all.
        decoded: columns that may hold anything, because a function makes tensors of them.
        wrong: takes the problems, for a caller that has more of them; the schema is that of the other columns then.
        raw: columns that are kept as they are stored, nulls included, for a function over batches.

    Raises:
        DataError: columns are missing or of a type that no tensor can hold; all problems are named at once.
    """

    def column(name: str) -> Column:
        if name in raw:
            return Column.raw(name)
        try:
            return column_of(name, arrow_schema.field(name).type)
        except DataError:
            if name not in decoded:
                raise
            return Column(name, ColumnKind.OTHER, "object")

    found, problems = each_column(columns, arrow_schema.names, column)
    if wrong is not None:
        wrong += problems
    elif problems:
        raise DataError("\n".join(problems))
    return Schema(tuple(found.values()))


def each_column(
    wanted: Sequence[str] | None, existing: Sequence[str], make: Callable[[str], T]
) -> tuple[dict[str, T], list[str]]:
    """What ``make`` returns for each of the wanted columns, and what is wrong.

    None stands for all columns; there is a message for each that is wrong. A column is wrong if it does not exist, if
    several have its name, or if ``make`` raises a DataError.
    """
    counts = Counter(existing)
    names = dict.fromkeys(existing if wanted is None else wanted)
    missing = [name for name in names if name not in counts]
    problems = [missing_columns_text(missing, existing)] if missing else []
    found: dict[str, T] = {}
    for name in names:
        if counts[name] > 1:
            problems.append(f"there are {counts[name]} columns named {name!r}: rename all but one")
        elif counts[name]:
            try:
                found[name] = make(name)
            except DataError as error:
                problems.append(str(error))
    return found, problems


def column_of(name: str, arrow_type: Any) -> Column:
    """The column for an Arrow type."""
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(arrow_type):
        return column_of(name, arrow_type.value_type)
    if types.is_null(arrow_type):
        raise DataError(f"column {name!r} holds nothing but nulls: fill it, or leave it out")
    if is_text(arrow_type):
        return Column(name, ColumnKind.STRING, "str")
    if is_bytes(arrow_type):
        return Column(name, ColumnKind.BINARY, "bytes")
    if types.is_temporal(arrow_type) and not types.is_interval(arrow_type):
        return Column(name, ColumnKind.TIME, "int64", unit="D" if types.is_date(arrow_type) else arrow_type.unit)
    if is_vector(arrow_type):
        return Column(name, ColumnKind.VECTOR, "float64", (UNKNOWN,))
    shape: list[int] = []
    element = arrow_type
    while True:
        if types.is_fixed_size_list(element):
            shape.append(element.list_size)
        elif types.is_list(element) or types.is_large_list(element):
            shape.append(UNKNOWN)
        else:
            break
        element = element.value_type
    dtype = _element_dtype(types, element)
    if dtype is None:
        raise DataError(no_tensor_type_text(name, str(arrow_type)))
    if shape:
        return Column(name, ColumnKind.LIST, dtype, tuple(shape))
    return Column(name, ColumnKind.BOOL if dtype == "bool" else ColumnKind.NUMERIC, dtype)


def is_vector(arrow_type: Any) -> bool:
    """Whether an Arrow type has the layout of Spark's VectorUDT.

    The layout is that of ``org.apache.spark.ml.linalg.VectorUDT.sqlType``; neither Parquet nor ``mapInArrow`` names
    the UDT in the Arrow type itself.
    """
    types = load_pyarrow("pyarrow.types")
    if not types.is_struct(arrow_type) or arrow_type.num_fields != 4:
        return False
    fields = [arrow_type.field(index) for index in range(4)]
    if [field.name for field in fields] != ["type", "size", "indices", "values"]:
        return False
    kind, size, indices, values = (field.type for field in fields)
    return bool(
        types.is_int8(kind)
        and types.is_int32(size)
        and _is_list_of(types, indices, types.is_int32)
        and _is_list_of(types, values, types.is_float64)
    )


def _is_list_of(types: Any, arrow_type: Any, is_element: Any) -> bool:
    return (types.is_list(arrow_type) or types.is_large_list(arrow_type)) and bool(is_element(arrow_type.value_type))


def _element_dtype(types: Any, arrow_type: Any) -> str | None:
    """The numpy name of a tensor's element for an Arrow scalar type, or None."""
    if types.is_boolean(arrow_type):
        return "bool"
    if types.is_decimal(arrow_type):
        return "float64"
    if types.is_integer(arrow_type) or types.is_floating(arrow_type):
        dtype = np.dtype(arrow_type.to_pandas_dtype()).name
        return WIDENED.get(dtype, str(dtype))
    return None


def _columns(texts: Sequence[str]) -> str:
    return f"column{'s' if len(texts) > 1 else ''} {', '.join(texts)}"
