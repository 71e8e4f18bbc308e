"""Unischema: what the fields of a petastorm data set are.

It has what Parquet does not know, such as shapes and codecs of images.
"""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import type_mapping
from hvd_cluster.petastorm.unischema_field import UnischemaField, python_value

__all__ = [
    "Unischema",
    "UnischemaField",
    "dict_to_spark_row",
    "encode_row",
    "encode_value",
    "insert_explicit_nulls",
    "match_unischema_fields",
]


class Unischema:
    """The fields of a data set, in their order.

    Each is an attribute too (``schema.image``).

    Args:
        name: of the schema; rows that are read are namedtuples of a type named after it.
        fields: UnischemaFields.

    Raises:
        DataError: two fields have one name.
    """

    def __init__(self, name: str, fields: Iterable[UnischemaField]) -> None:
        self._name = name
        self._fields: OrderedDict[str, UnischemaField] = OrderedDict()
        for field in fields:
            if field.name in self._fields:
                raise DataError(f"schema {name!r} has two fields named {field.name!r}")
            self._fields[field.name] = field

    @property
    def fields(self) -> OrderedDict[str, UnischemaField]:
        """Name -> field."""
        return self._fields

    def __getattr__(self, name: str) -> UnischemaField:
        fields = vars(self).get("_fields", {})
        if name in fields:
            field: UnischemaField = fields[name]
            return field
        raise AttributeError(f"schema {vars(self).get('_name')!r} has no field {name!r}; it has {', '.join(fields)}")

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_fields": self._fields}

    def __repr__(self) -> str:
        lines = [
            f"  UnischemaField({field.name!r}, {getattr(field.numpy_dtype, '__name__', field.numpy_dtype)}, "
            f"{field.shape}, {field.codec!r}, {field.nullable}),"
            for field in self._fields.values()
        ]
        return "\n".join([f"Unischema({self._name}, [", *lines, "])"])

    def create_schema_view(self, fields: Sequence[UnischemaField | str]) -> Unischema:
        """The schema of some of the fields.

        Args:
            fields: fields of this schema, and regular expressions for whole names; those named come first.

        Raises:
            DataError: a field does not belong to this schema.
        """
        named = [field for field in fields if isinstance(field, tuple)]
        foreign = sorted({field.name for field in named} - set(self._fields))
        if foreign:
            raise DataError(f"fields {foreign} do not belong to schema {self._name!r}, which has {list(self._fields)}")
        chosen = {field.name: self._fields[field.name] for field in named}
        for field in match_unischema_fields(self, [field for field in fields if isinstance(field, str)]):
            chosen.setdefault(field.name, field)
        return Unischema(f"{self._name}_view", chosen.values())

    def make_namedtuple(self, **kargs: Any) -> Any:
        """A row as a namedtuple."""
        return self.row_type(**kargs)

    @cached_property
    def row_type(self) -> type[Any]:
        """The type of the rows: a namedtuple.

        Its ``_asdict`` keeps names that Python cannot take as attributes.
        """
        return _row_type(self._name, tuple(self._fields))

    def as_spark_schema(self) -> Any:
        """The ``pyspark.sql.types.StructType`` of the encoded rows."""
        return type_mapping.struct_type(self._fields.values())

    @classmethod
    def from_arrow_schema(cls, parquet_dataset: Any, omit_unsupported_fields: bool = True) -> Unischema:
        """The schema for Arrow's types, of fields without codecs.

        Args:
            parquet_dataset: a ``pyarrow.Schema``, or anything with one as ``schema``.
            omit_unsupported_fields: leave out columns of types that have no counterpart (structs, maps, durations).

        Raises:
            DataError: there is such a column, and it is not to be left out.
        """
        return cls("inferred_schema", type_mapping.fields_of(parquet_dataset, omit_unsupported_fields))


def _row_type(schema_name: str, names: tuple[str, ...]) -> type[Any]:
    type_name = schema_name if schema_name.isidentifier() else "Row"
    plain = namedtuple(type_name, names, rename=True)  # type: ignore[misc]
    if plain._fields == names:
        return plain

    class Renamed(plain):
        __slots__ = ()

        def __new__(cls, *args: Any, **kargs: Any) -> Any:
            given = {plain._fields[names.index(name)] if name in names else name: v for name, v in kargs.items()}
            return super().__new__(cls, *args, **given)

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(names, self, strict=True))

    Renamed.__name__ = type_name
    return Renamed


def match_unischema_fields(schema: Unischema, field_regex: Iterable[str]) -> list[UnischemaField]:
    """The fields whose whole name matches one of ``field_regex``, in schema order.

    Raises:
        DataError: an expression cannot be understood.
    """
    try:
        patterns = [re.compile(pattern) for pattern in field_regex]
    except re.error as error:
        raise DataError(f"{error.pattern!r} is not a regular expression: {error}") from error
    return [
        field
        for name, field in schema.fields.items()
        if any(pattern.fullmatch(name) is not None for pattern in patterns)
    ]


def insert_explicit_nulls(unischema: Unischema, row_dict: MutableMapping[str, Any]) -> None:
    """Add None to ``row_dict`` for nullable fields of ``unischema`` that it lacks.

    Raises:
        DataError: a field is missing that may not be null.
    """
    for name, field in unischema.fields.items():
        if name not in row_dict:
            if not field.nullable:
                raise DataError(f"field {name!r} is not in the row, but may not be null")
            row_dict[name] = None


def encode_row(unischema: Unischema, row_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``row_dict`` as Parquet holds them, in ``unischema``'s order.

    They are numbers, str, bytes, Decimal and dates.

    Raises:
        DataError: a field is missing or unknown, null without being nullable, or its value is not what the field says.
    """
    row = dict(row_dict)
    insert_explicit_nulls(unischema, row)
    unknown = [name for name in row if name not in unischema.fields]
    if unknown:
        raise DataError(f"the row has fields {unknown}, but the schema has {list(unischema.fields)}")
    return {name: encode_value(field, row[name]) for name, field in unischema.fields.items()}


def encode_value(field: UnischemaField, value: Any) -> Any:
    """One value as Parquet holds it.

    Raises:
        DataError: it is null without being nullable, or is not what the field says.
    """
    if value is None:
        if not field.nullable:
            raise DataError(f"field {field.name!r} is None, but may not be null")
        return None
    if field.codec is not None:
        return field.codec.encode(field, value)
    return python_value(value)


def dict_to_spark_row(unischema: Unischema, row_dict: Mapping[str, Any]) -> Any:
    """``row_dict``, encoded as ``unischema`` says, as a ``pyspark.sql.Row``."""
    return type_mapping.row(encode_row(unischema, row_dict))
