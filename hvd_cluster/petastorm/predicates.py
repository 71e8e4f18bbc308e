"""Predicates: which rows a reader returns.

They are decided from a few fields before the others are decoded.
"""

from __future__ import annotations

import abc
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.columns import decoded
from hvd_cluster.petastorm.type_mapping import fields_of


class PredicateBase(abc.ABC):
    """A predicate, for both readers.

    ``do_include`` of your own must take what a reader passes.
    """

    @abc.abstractmethod
    def get_fields(self) -> Collection[str]:
        """The fields that it looks at."""

    @abc.abstractmethod
    def do_include(self, values: Any) -> Any:
        """Whether to give a row.

        Args:
            values: with ``make_reader``, field name -> value of one row; with ``make_batch_reader``, a pandas
                DataFrame of n rows.

        Returns:
            A bool, or for a DataFrame n bools.
        """

    def include_batch(self, table: Any) -> Any:
        """The n bools for an Arrow table of n rows."""
        return self.do_include(table.select(sorted(self.get_fields())).to_pandas())


class _RowPredicate(PredicateBase):
    """A predicate on single rows, which is applied to each row of a table."""

    def include_batch(self, table: Any) -> npt.NDArray[np.bool_]:
        frame = self._frame(table)
        names = list(frame.columns)
        columns = [frame[name].tolist() for name in names]
        rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        return np.fromiter((bool(self.do_include(row)) for row in rows), dtype=bool, count=len(frame))

    def _frame(self, table: Any) -> Any:
        # Else a null turns the integers of its row group into floats, whose text is "5.0".
        return table.select(sorted(self.get_fields())).to_pandas(integer_object_nulls=True)


class _OfField(_RowPredicate):
    """A predicate on one field."""

    _field: str

    def get_fields(self) -> set[str]:
        return {self._field}


class in_set(_OfField):
    """Rows whose field ``predicate_field`` has one of ``inclusion_values``."""

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        self._values = set(inclusion_values)
        self._field = predicate_field

    def do_include(self, values: Mapping[str, Any]) -> bool:
        return values[self._field] in self._values

    def include_batch(self, table: Any) -> Any:
        return self._frame(table)[self._field].isin(list(self._values))


class in_intersection(_OfField):
    """Rows whose array ``_predicate_field`` holds any of ``inclusion_values``."""

    def __init__(self, inclusion_values: Iterable[Any], _predicate_field: str) -> None:
        self._values = list(inclusion_values)
        self._field = _predicate_field

    def do_include(self, values: Mapping[str, Any]) -> bool:
        held = values[self._field]
        return held is not None and bool(np.any(np.isin(held, self._values)))


class in_lambda(PredicateBase):
    """Rows for which a function of some fields is true.

    Args:
        predicate_fields: the fields, in the order of the function's arguments.
        predicate_func: called with their values (with ``make_batch_reader``: with pandas Series).
        state_arg: given, it is the function's last argument.

    Raises:
        DataError: the fields are not a list of names.
    """

    def __init__(
        self, predicate_fields: Sequence[str], predicate_func: Callable[..., Any], state_arg: Any = None
    ) -> None:
        if isinstance(predicate_fields, str) or not all(isinstance(name, str) for name in predicate_fields):
            raise DataError(f"predicate_fields is {predicate_fields!r}: give a list of field names")
        self._fields = list(predicate_fields)
        self._func = predicate_func
        self._state = state_arg

    def get_fields(self) -> set[str]:
        return set(self._fields)

    def do_include(self, values: Any) -> Any:
        arguments = [values[name] for name in self._fields]
        return self._func(*arguments) if self._state is None else self._func(*arguments, self._state)


class in_negate(PredicateBase):
    """Rows that another predicate leaves out."""

    def __init__(self, predicate: PredicateBase) -> None:
        self._predicate = _checked(predicate)

    def get_fields(self) -> Collection[str]:
        return self._predicate.get_fields()

    def do_include(self, values: Any) -> bool:
        return not self._predicate.do_include(values)

    def include_batch(self, table: Any) -> Any:
        return ~np.asarray(self._predicate.include_batch(table), dtype=bool)


class in_reduce(PredicateBase):
    """Rows for which a function of other predicates' answers is true.

    Args:
        predicate_list: the predicates.
        reduce_func: list of bools -> bool, such as ``all`` or ``any``.
    """

    def __init__(self, predicate_list: Sequence[PredicateBase], reduce_func: Callable[[list[bool]], Any]) -> None:
        self._predicates = [_checked(predicate) for predicate in predicate_list]
        self._reduce = reduce_func

    def get_fields(self) -> set[str]:
        return {name for predicate in self._predicates for name in predicate.get_fields()}

    def do_include(self, values: Any) -> bool:
        return bool(self._reduce([bool(predicate.do_include(values)) for predicate in self._predicates]))

    def include_batch(self, table: Any) -> npt.NDArray[np.bool_]:
        masks = [np.asarray(predicate.include_batch(table), dtype=bool) for predicate in self._predicates]
        rows = range(table.num_rows)
        return np.array([bool(self._reduce([bool(mask[row]) for mask in masks])) for row in rows], bool)


class in_pseudorandom_split(_OfField):
    """One part of a split that depends on a field's value alone, as petastorm's.

    The MD5 of the value's text, as a number modulo ``sys.maxsize``, falls on one of the intervals that the fractions
    cut [0, 1) into. MD5 only scatters here; it protects nothing.

    Args:
        fraction_list: lengths of the intervals; their sum is 1 at most, and what is left belongs to no part.
        subset_index: which of them.
        predicate_field: the field.

    Raises:
        DataError: the numbers make no sense.
    """

    def __init__(self, fraction_list: Sequence[float], subset_index: int, predicate_field: str) -> None:
        if not 0 <= subset_index < len(fraction_list):
            raise DataError(f"subset_index is {subset_index}, but there are {len(fraction_list)} fractions")
        if any(not 0 <= fraction <= 1 for fraction in fraction_list) or sum(fraction_list) > 1 + 1e-9:
            raise DataError(f"fraction_list is {list(fraction_list)}: fractions are in [0, 1], and 1 together at most")
        self._low = sum(fraction_list[:subset_index])
        self._high = sum(fraction_list[: subset_index + 1])
        self._field = predicate_field

    def do_include(self, values: Mapping[str, Any]) -> bool:
        digest = hashlib.md5(str(values[self._field]).encode(), usedforsecurity=False).hexdigest()
        return self._low <= int(digest, 16) % sys.maxsize / sys.maxsize < self._high

    def include_batch(self, table: Any) -> npt.NDArray[np.bool_]:
        """The n bools for the values that ``make_reader`` decodes.

        Those of pandas have other texts.
        """
        try:
            (field,) = fields_of(table.select([self._field]).schema, omit_unsupported_fields=False)
        except DataError:  # a type that make_reader does not read
            return super().include_batch(table)
        values = decoded(table.column(self._field), field)
        return np.fromiter((self.do_include({self._field: value}) for value in values), bool, table.num_rows)


def _checked(predicate: Any) -> PredicateBase:
    if not isinstance(predicate, PredicateBase):
        raise DataError(f"{predicate!r} is not a predicate: pass an instance of a class derived from PredicateBase")
    return predicate
