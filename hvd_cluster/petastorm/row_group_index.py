"""petastorm's index of row groups: read from a data set's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import metadata, safe_pickle
from hvd_cluster.petastorm.errors import PetastormMetadataError
from hvd_cluster.petastorm.location import Location

_INDEXERS = "petastorm.etl.rowgroup_indexers."
_SINGLE, _NOT_NULL = f"{_INDEXERS}SingleFieldIndexer", f"{_INDEXERS}FieldNotNullIndexer"
_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_DTYPE = "numpy.dtype"
_DICTS = ("collections.defaultdict",)
_ADMITTED = frozenset(
    {_SINGLE, _NOT_NULL, _DTYPE, *_SCALARS, *_DICTS, "builtins.set", "__builtin__.set", "numpy.str_", "numpy.bytes_"}
)


@dataclass(frozen=True)
class RowGroupIndex:
    """Which row groups hold which values of one field."""

    #: Its own name, and the field's.
    index_name: str
    field_name: str
    #: Value -> numbers of row groups; None where the index only says where the field is not null.
    by_value: Mapping[Any, frozenset[int]] | None
    #: Row groups in which the field is not null.
    numbers: frozenset[int] = field(default_factory=frozenset)

    @property
    def column_names(self) -> list[str]:
        """The indexed fields."""
        return [self.field_name]

    @property
    def indexed_values(self) -> list[Any]:
        """The values, where the index has them."""
        return list(self.by_value or [])

    def get_row_group_indexes(self, value_key: Any = None) -> set[int]:
        """The numbers of the row groups that hold a value, or any if None is given."""
        if self.by_value is None:
            return set(self.numbers)
        return set(self.by_value.get(value_key, frozenset()))


def read(location: Location) -> dict[str, RowGroupIndex]:
    """Name -> index.

    Raises:
        PetastormMetadataError: the data set has none, or it is refused.
    """
    pickled = metadata.read(location).get(metadata.INDEX_KEY)
    if pickled is None:
        raise PetastormMetadataError(f"{location.text} has no index of row groups: use filters, or a predicate")
    return loads(pickled)


def loads(data: bytes) -> dict[str, RowGroupIndex]:
    """Name -> index, of all that petastorm's ``build_rowgroup_index`` has written.

    Raises:
        PetastormMetadataError: the pickle holds or asks for anything else, or is damaged.
    """
    try:
        found = safe_pickle.load(data, _ADMITTED, set(_DICTS))
        if not isinstance(found, dict):
            raise safe_pickle.UntrustedPickleError("it is not a dict of indexes")
        return {str(name): _index(index) for name, index in found.items()}
    except (safe_pickle.UntrustedPickleError, DataError) as error:
        raise PetastormMetadataError(f"the pickled index of row groups is refused: {error}") from error


def _index(value: Any) -> RowGroupIndex:
    kind = safe_pickle.made(value)
    if kind not in {_SINGLE, _NOT_NULL}:
        raise safe_pickle.UntrustedPickleError("an index is none of petastorm's")
    state = safe_pickle.state_of(value)
    name, column, data = state.get("_index_name"), state.get("_column_name"), state.get("_index_data")
    if not isinstance(name, str) or not isinstance(column, str):
        raise safe_pickle.UntrustedPickleError("an index has no name")
    if kind == _NOT_NULL:
        return RowGroupIndex(name, column, None, _numbers(data))
    if isinstance(data, safe_pickle.PickledMapping):
        pairs = data.items
    elif isinstance(data, dict):
        pairs = list(data.items())
    else:
        raise safe_pickle.UntrustedPickleError(f"the index {name!r} has no values")
    return RowGroupIndex(name, column, {_value(key): _numbers(numbers) for key, numbers in pairs})


def _numbers(value: Any) -> frozenset[int]:
    if safe_pickle.made(value).endswith(".set") and value.args and isinstance(value.args[0], list):
        value = value.args[0]  # protocols below 4 pickle a set as set([...])
    if not isinstance(value, (set, list)) or not all(type(number) is int for number in value):
        raise safe_pickle.UntrustedPickleError("an index holds values that are not numbers of row groups")
    return frozenset(value)


def _value(value: Any) -> Any:
    """A key as what compares equal to the user's value."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if safe_pickle.made(value) in _SCALARS and len(value.args) == 2:
        dtype, content = value.args
        if (
            safe_pickle.made(dtype) == _DTYPE
            and dtype.args
            and isinstance(dtype.args[0], str)
            and isinstance(content, bytes)
        ):
            try:
                scalar = np.dtype(dtype.args[0])
            except (TypeError, ValueError, SyntaxError) as error:
                raise safe_pickle.UntrustedPickleError("an index has a key of no dtype") from error
            if scalar.kind in "biufSU" and scalar.names is None and scalar.itemsize == len(content):
                return np.frombuffer(content, scalar)[0].item()
    text = value.args[0] if safe_pickle.made(value) in {"numpy.str_", "numpy.bytes_"} and value.args else None
    if isinstance(text, (str, bytes)):
        return text
    raise safe_pickle.UntrustedPickleError("an index has a key that is not a plain value")
