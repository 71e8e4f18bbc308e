"""One Arrow schema for all files of a data set.

It has every column that any file has, in a type that holds all its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cluster.data.columns.arrays import UNITS
from hvd_cluster.data.columns.arrow_values import is_bytes, is_list, is_text, is_variable_bytes, time_of_day
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import is_vector
from hvd_cluster.errors import DataError


@dataclass(frozen=True)
class CommonSchema:
    """What the files of a data set hold together."""

    #: ``pyarrow.Schema`` of all columns, in the order in which files have them first.
    schema: Any
    #: Column without a common type -> a file, another that has it in another type, and the two types as text.
    conflicts: dict[str, tuple[str, str, str]]
    #: For each file, the columns that it lacks; their rows there are nulls.
    lacking: tuple[tuple[str, ...], ...]
    #: Column -> its Arrow type, for those that some file has in another type or lacks.
    changed: dict[str, Any]

    @classmethod
    def of(cls, schemas: Sequence[Any], files: Sequence[str]) -> CommonSchema:
        """The common schema of files."""
        pyarrow = load_pyarrow()
        fields = list(schemas[0])
        places = {field.name: index for index, field in enumerate(fields)}
        sources = dict.fromkeys(places, files[0])
        conflicts: dict[str, tuple[str, str, str]] = {}
        # Most files have one of a few schemas. pyarrow 14 cannot hash those with metadata, such as Spark's and pandas'.
        keys = [schema.remove_metadata().serialize().to_pybytes() for schema in schemas]
        seen = {keys[0]: schemas[0]}
        for key, schema, file in zip(keys[1:], schemas[1:], files[1:], strict=True):
            if key in seen:
                continue
            seen[key] = schema
            for field in schema:
                if field.name not in places:
                    places[field.name] = len(fields)
                    sources[field.name] = file
                    fields.append(field)
                    continue
                index = places[field.name]
                common = common_type(fields[index].type, field.type)
                if common is None:
                    was = f"{field.name!r} is {field.type} and was {fields[index].type}"
                    conflicts.setdefault(field.name, (file, sources[field.name], was))
                elif common != fields[index].type:
                    fields[index] = field.with_type(common)
        names = list(places)
        held = {key: frozenset(schema.names) for key, schema in seen.items()}
        missing = {key: tuple(name for name in names if name not in own) for key, own in held.items()}
        metadata = schemas[0].metadata
        lacking = tuple(missing[key] for key in keys)
        stored = [{field.name: field.type for field in schema} for schema in seen.values()]
        changed = {
            field.name: field.type for field in fields if any(types.get(field.name) != field.type for types in stored)
        }
        return cls(pyarrow.schema(fields, metadata=metadata), conflicts, lacking, changed)

    def require(self, names: Iterable[str]) -> None:
        """Check that the named columns have one type."""
        wrong: dict[tuple[str, str], list[str]] = {}
        for name in dict.fromkeys(names):
            if name in self.conflicts:
                file, other, types = self.conflicts[name]
                wrong.setdefault((file, other), []).append(types)
        if wrong:
            lines = [
                f"columns of {file} have other types than those of {other}: {'; '.join(types)}"
                for (file, other), types in wrong.items()
            ]
            raise DataError(f"{'; '.join(lines)}. Write the files with one schema, or leave these columns out")


def common_type(one: Any, other: Any) -> Any:
    """The Arrow type that holds the values of two; None where there is none.

    Whole numbers beside floating ones become float64, which the cast checks value by value. Units of time become the
    finer one, decimals get the digits of both. Text and numbers have no common type, nor do dates and timestamps.
    """
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_dictionary(one) or types.is_dictionary(other):
        plain = [kind.value_type if types.is_dictionary(kind) else kind for kind in (one, other)]
        return common_type(*plain)
    if is_list(types, one) and is_list(types, other):
        return _common_list(types, one, other)
    if is_vector(one) and is_list(types, other):
        return one if _is_dense_vector(types, other) else None
    if is_vector(other) and is_list(types, one):
        return other if _is_dense_vector(types, one) else None
    both = (one, other)
    if all(map(types.is_integer, both)):
        return _common_integer(types, one, other)
    if all(types.is_integer(kind) or types.is_floating(kind) for kind in both):
        if all(map(types.is_floating, both)):
            return max(both, key=lambda kind: kind.bit_width)
        return pyarrow.float64()
    if all(types.is_decimal(kind) or types.is_integer(kind) or types.is_floating(kind) for kind in both):
        return pyarrow.float64() if any(map(types.is_floating, both)) else _common_decimal(types, one, other)
    if all(map(types.is_date, both)):
        return pyarrow.date32()
    if all(map(types.is_timestamp, both)):
        zones = {kind.tz for kind in both}
        return pyarrow.timestamp(_finer(one, other), zones.pop() if len(zones) == 1 else "UTC")
    if all(map(types.is_duration, both)):
        return pyarrow.duration(_finer(one, other))
    if all(map(types.is_time, both)):
        return time_of_day(_finer(one, other))
    if all(map(is_text, both)):
        return pyarrow.large_string()
    if all(map(is_bytes, both)):
        return pyarrow.large_binary() if any(map(types.is_large_binary, both)) else pyarrow.binary()
    return None


def keeps_values(stored: Any, wanted: Any) -> bool:
    """Whether values of one Arrow type stay the same in another.

    Then bounds of them are bounds there too. A cast that fails does not matter.
    """
    types = load_pyarrow("pyarrow.types")
    both = [kind.value_type if types.is_dictionary(kind) else kind for kind in (stored, wanted)]
    narrow, wide = both
    if narrow == wide or all(map(types.is_integer, both)):
        return True
    if all(map(types.is_floating, both)):
        return bool(wide.bit_width >= narrow.bit_width)
    if all(map(types.is_decimal, both)):
        return bool(wide.scale >= narrow.scale)
    if all(map(types.is_timestamp, both)):
        return bool(narrow.tz == wide.tz and _finer(narrow, wide) == wide.unit)
    return all(map(is_text, both)) or all(map(is_bytes, both))


def as_type(array: Any, wanted: Any, name: str, file: str) -> Any:
    """A file's ``pyarrow.ChunkedArray`` in the type that all files share.

    Text that is read as dictionaries stays so, as do lists beside vectors; other dictionaries become their values.
    """
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    if types.is_dictionary(wanted):
        wanted = wanted.value_type
    if is_text_dictionary(array.type):
        if array.type.value_type == wanted:
            return array
        dictionary = pyarrow.dictionary(array.type.index_type, wanted)
        chunks = [
            pyarrow.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(wanted)) for chunk in array.chunks
        ]
        return pyarrow.chunked_array(chunks, type=dictionary)
    if array.type == wanted or (is_vector(wanted) and not types.is_null(array.type)):
        return array
    try:
        return array.cast(wanted)
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(
            f"column {name!r} is {array.type} in {file}, and {wanted} holds the values of all files, but not these: "
            f"{error}; write the files with one type"
        ) from error


def is_text_dictionary(arrow_type: Any) -> bool:
    """Whether a type is a dictionary of text or bytes; False for None."""
    if arrow_type is None or not load_pyarrow("pyarrow.types").is_dictionary(arrow_type):
        return False
    return is_text(arrow_type.value_type) or is_variable_bytes(arrow_type.value_type)


def _common_list(types: Any, one: Any, other: Any) -> Any:
    pyarrow = load_pyarrow()
    element = common_type(one.value_type, other.value_type)
    if element is None:
        return None
    if all(map(types.is_fixed_size_list, (one, other))) and one.list_size == other.list_size:
        return pyarrow.list_(element, one.list_size)
    return pyarrow.large_list(element) if any(map(types.is_large_list, (one, other))) else pyarrow.list_(element)


def _is_dense_vector(types: Any, arrow_type: Any) -> bool:
    """Whether a list is how we write dense vectors, a file at a time.

    See data/writing/part_file.py.
    """
    return bool(types.is_float32(arrow_type.value_type) or types.is_float64(arrow_type.value_type))


def _common_integer(types: Any, one: Any, other: Any) -> Any:
    pyarrow = load_pyarrow()
    wide = max((one, other), key=lambda kind: kind.bit_width)
    signed = [types.is_signed_integer(kind) for kind in (one, other)]
    if signed[0] == signed[1]:
        return wide
    unsigned = one if signed[1] else other
    bits = max(wide.bit_width, min(64, 2 * unsigned.bit_width))  # uint64 keeps to int64, which the cast checks
    return {16: pyarrow.int16(), 32: pyarrow.int32(), 64: pyarrow.int64()}[bits]


#: Digits of the largest number with this many bits.
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}


def _common_decimal(types: Any, one: Any, other: Any) -> Any:
    pyarrow = load_pyarrow()
    sizes = [
        (kind.precision, kind.scale) if types.is_decimal(kind) else (_DIGITS[kind.bit_width], 0)
        for kind in (one, other)
    ]
    scale = max(scale for _, scale in sizes)
    precision = max(precision - scale for precision, scale in sizes) + scale
    if precision > 76:
        return None
    return pyarrow.decimal128(precision, scale) if precision <= 38 else pyarrow.decimal256(precision, scale)


def _finer(one: Any, other: Any) -> str:
    return UNITS[max(UNITS.index(kind.unit) for kind in (one, other))]
