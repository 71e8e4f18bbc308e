"""Which rows are wanted, as a value.

It is decided for a whole row group from its statistics, or row by row on Arrow data. Arrow's own pruning is not used:
it takes the statistics of a column with NaNs as if they covered the NaNs (as of pyarrow 26), and so counts rows that do
not match and passes over some that do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.comparison import aligned, compare, is_in, is_missing, measured
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: (column, operator, value).
Condition = tuple[str, str, Any]

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
#: Their value is ignored.
_NULL_CHECKS = ("is null", "is valid")
OPERATORS = (*_COMPARISONS, "in", "not in", *_NULL_CHECKS)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What is known of a column in one row group, without reading it."""

    #: Rows of the row group.
    rows: int
    #: Rows that are null; None if that is not known.
    nulls: int | None = None
    #: Bounds of the values that are neither null nor NaN; None if they are not known.
    low: Any = None
    high: Any = None


@dataclass(frozen=True)
class RowFilter:
    """Rows for which all conditions of at least one group hold.

    A null meets no condition but "is null"; a NaN none but "!=" and "not in" (and "is valid": it is a value).
    """

    #: Groups of conditions; no group is empty.
    any_of: tuple[tuple[Condition, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it looks at, each once."""
        return tuple(dict.fromkeys(name for group in self.any_of for name, _, _ in group))

    def verdict(self, statistics: Callable[[str], Statistics]) -> bool | None:
        """Whether all rows of a row group match (True), or none (False).

        None if only the rows decide.
        """
        groups = []
        for group in self.any_of:
            answers = [_verdict(op, value, statistics(name)) for name, op, value in group]
            groups.append(False if False in answers else (None if None in answers else True))
        return True if True in groups else (None if None in groups else False)

    def mask(self, table: pa.Table) -> Any:
        """Whether each row of a table matches.

        A ``pyarrow.ChunkedArray`` of n bools, without nulls.
        """
        compute = load_pyarrow("pyarrow.compute")
        any_of = None
        for group in self.any_of:
            all_of = None
            for name, op, value in group:
                found = compute.fill_null(_matches(table.column(name), name, op, value), False)
                all_of = found if all_of is None else compute.and_(all_of, found)
            any_of = all_of if any_of is None else compute.or_(any_of, all_of)
        return any_of


def parse(filters: Any, valid: Collection[str] = ()) -> RowFilter | None:
    """What the user wrote as one value.

    Args:
        filters: None, a list of conditions ``(column, operator, value)`` that all must hold, or a list of such lists of
            which one must hold. Operators: ``== != < <= > >= in "not in" "is null" "is valid"`` (and ``=``); the last
            two take a tuple of two.
        valid: further columns that must not be null.

    Returns:
        None where every row is wanted.
    """
    groups: list[tuple[Condition, ...]] = []
    if filters is not None:
        if not isinstance(filters, Sequence) or isinstance(filters, str) or not filters:
            raise DataError(f"filters is {filters!r}: give a list of (column, operator, value), or of such lists")
        nested = all(isinstance(entry, list) for entry in filters)
        groups = [tuple(map(_condition, group)) for group in (filters if nested else [filters])]
        if not all(groups):
            raise DataError("filters holds an empty list: leave it out")
    present = tuple((name, "is valid", None) for name in valid)
    if not groups:
        return RowFilter((present,)) if present else None
    return RowFilter(tuple(group + present for group in groups))


def _condition(entry: Any) -> Condition:
    if isinstance(entry, (tuple, list)) and len(entry) in {2, 3} and isinstance(entry[0], str):
        name, op = entry[0], "==" if entry[1] == "=" else entry[1]
        if op in _NULL_CHECKS:
            return name, op, None
        several = len(entry) == 3 and isinstance(entry[2], Iterable) and not isinstance(entry[2], (str, bytes))
        if op in {"in", "not in"} and several:
            # In an order that every process finds: a set of texts has another one in each.
            choices = {repr(value): value for value in entry[2] if not is_missing(value)}
            return name, op, tuple(choices[text] for text in sorted(choices))
        if op in _COMPARISONS and len(entry) == 3 and not is_missing(entry[2]):
            return name, op, entry[2]
    raise DataError(
        f"{entry!r} in filters is not a condition: write (column, operator, value) with one of the operators "
        f"{', '.join(map(repr, OPERATORS))}; nulls are found with 'is null'"
    )


def _verdict(op: str, value: Any, known: Statistics) -> bool | None:
    if op in _NULL_CHECKS:
        if known.nulls is None or 0 < known.nulls < known.rows:
            return None
        return (known.nulls == 0) == (op == "is valid")
    if known.nulls == known.rows:
        return False
    try:
        answer = _of_bounds(op, value, known)
    except (TypeError, ValueError):  # the rows decide, or refuse the value
        return None
    return None if answer and known.nulls != 0 else answer


def _of_bounds(op: str, value: Any, known: Statistics) -> bool | None:
    """The verdict on the rows that are not null."""
    low, high = known.low, known.high
    if low is None or high is None:
        return None
    if op == "in":
        answers = [_of_bounds("==", one, known) for one in value]
        return True if True in answers else (None if None in answers else False)
    if op == "not in":
        answers = [_of_bounds("!=", one, known) for one in value]
        return False if False in answers else (None if None in answers else True)
    (low_kind, low), (high_kind, high), (kind, number) = measured(low), measured(high), measured(value)
    if {low_kind, high_kind} != {kind}:  # a string against a date or a number
        return None
    if number != number:
        return bool(op == "!=")
    value = aligned(number, low)
    # The bounds say nothing of NaNs: they match "!=" and nothing else.
    may_be_nan = isinstance(known.low, float)
    if op in {"==", "!="}:
        outside, only = not low <= value <= high, low == value == high
        if op == "==":
            return False if outside else (True if only and not may_be_nan else None)
        return True if outside else (False if only and not may_be_nan else None)
    holds = _COMPARISONS[op]
    some = holds(low if op[0] == "<" else high, value)
    every = holds(high if op[0] == "<" else low, value)
    return (True if every and not may_be_nan else None) if some else False


def _matches(column: Any, name: str, op: str, value: Any) -> Any:
    """The condition for each row of a column, null where the row is null."""
    pyarrow, compute = load_pyarrow(), load_pyarrow("pyarrow.compute")
    if op in _NULL_CHECKS:
        return compute.is_valid(column) if op == "is valid" else compute.is_null(column)
    if pyarrow.types.is_null(column.type):  # what a folder named null
        return pyarrow.chunked_array([pyarrow.nulls(len(column), pyarrow.bool_())])
    if pyarrow.types.is_dictionary(column.type):  # each distinct value once
        chunks = [_matches(chunk.dictionary, name, op, value).take(chunk.indices) for chunk in column.chunks]
        return pyarrow.chunked_array(chunks, type=pyarrow.bool_())
    try:
        if op in {"in", "not in"}:
            found = is_in(column, value)
            return found if op == "in" else compute.and_(compute.invert(found), compute.is_valid(column))
        return compare(column, op, value)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} holds {column.type}, which cannot be compared with {value!r} ({op}): {error}"
        ) from error
