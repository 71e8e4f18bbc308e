"""The pickled schema of petastorm's metadata, read as untrusted data.

It is written so that petastorm 0.13.1 loads it.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import safe_pickle, spark_types
from hvd_cluster.petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    DataframeColumnCodec,
    NdarrayCodec,
    ScalarCodec,
    registered_codecs,
)
from hvd_cluster.petastorm.errors import PetastormMetadataError
from hvd_cluster.petastorm.unischema import Unischema
from hvd_cluster.petastorm.unischema_field import UnischemaField

#: NumPy's scalar classes by the names that pickles use; names of later or earlier releases too.
_NUMPY_NAMES = (
    *("bool_", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "intc", "uintc"),
    *("int_", "longlong", "ulonglong", "uint", "float16", "float32", "float64", "complex64", "complex128"),
    *("str_", "unicode_", "bytes_", "string_", "datetime64", "timedelta64", "object_"),
)
_RENAMED = {"bool": "bool_", "unicode_": "str_", "string_": "bytes_"}
_DTYPES: dict[str, Any] = {
    "decimal.Decimal": Decimal,
    "_decimal.Decimal": Decimal,
    **{f"numpy.{name}": getattr(np, _RENAMED.get(name, name)) for name in _NUMPY_NAMES},
    **{f"{module}.int": np.int64 for module in ("builtins", "__builtin__")},
    **{f"{module}.float": np.float64 for module in ("builtins", "__builtin__")},
    **{f"{module}.bool": np.bool_ for module in ("builtins", "__builtin__")},
    **{f"{module}.str": np.str_ for module in ("builtins", "__builtin__")},
    **{f"{module}.bytes": np.bytes_ for module in ("builtins", "__builtin__")},
}
_SCHEMA, _FIELD = "petastorm.unischema.Unischema", "petastorm.unischema.UnischemaField"
_CODECS = "petastorm.codecs."
_SPARK = "pyspark.sql.types."
_ORDERED = "collections.OrderedDict"
_DTYPE = "numpy.dtype"
_ADMITTED = frozenset(
    {
        *(_SCHEMA, _FIELD, _ORDERED, _DTYPE),
        *(f"{_CODECS}{kind.__name__}" for kind in (ScalarCodec, NdarrayCodec, CompressedNdarrayCodec)),
        f"{_CODECS}CompressedImageCodec",
        *(f"{_SPARK}{name}" for name in spark_types.SPARK_TYPES),
        *_DTYPES,
    }
)


def loads(data: bytes) -> Unischema:
    """The schema in a pickle that petastorm, or :func:`dumps`, has written.

    Raises:
        PetastormMetadataError: the pickle holds or asks for anything else than a schema, or is damaged.
    """
    try:
        return _schema(safe_pickle.load(data, _ADMITTED | set(registered_codecs), {_ORDERED}))
    except (safe_pickle.UntrustedPickleError, DataError) as error:
        raise PetastormMetadataError(
            f"the pickled schema is refused: {error}. Only petastorm's own classes, NumPy's dtypes and Spark's leaf "
            "types are read; a codec of your own needs hvd_cluster.petastorm.codecs.register_codec first"
        ) from error


def _schema(value: Any) -> Unischema:
    if safe_pickle.made(value) != _SCHEMA:
        raise safe_pickle.UntrustedPickleError("it is not a Unischema")
    state = safe_pickle.state_of(value)
    name, fields = state.get("_name"), state.get("_fields")
    if not isinstance(name, str):
        raise safe_pickle.UntrustedPickleError("the schema has no name")
    if isinstance(fields, safe_pickle.PickledMapping):
        pairs = list(fields.items)
        if len(fields.args) == 1 and isinstance(fields.args[0], list):  # how Python 2 pickled it
            pairs = [tuple(pair) for pair in fields.args[0] if isinstance(pair, (list, tuple)) and len(pair) == 2]
    elif isinstance(fields, dict):
        pairs = list(fields.items())
    else:
        raise safe_pickle.UntrustedPickleError("the schema has no fields")
    return Unischema(name, [_field(value) for _, value in pairs])


def _field(value: Any) -> UnischemaField:
    if safe_pickle.made(value) != _FIELD or len(value.args) not in {4, 5}:
        raise safe_pickle.UntrustedPickleError("a field of the schema is not a UnischemaField")
    name, dtype, shape, codec, *nullable = value.args
    if not isinstance(name, str):
        raise safe_pickle.UntrustedPickleError("a field has no name")
    if not isinstance(shape, (tuple, list)) or not all(length is None or type(length) is int for length in shape):
        raise safe_pickle.UntrustedPickleError(f"the shape of field {name!r} is invalid")
    return UnischemaField(name, _dtype(name, dtype), tuple(shape), _codec(name, codec), nullable == [True])


def _dtype(name: str, value: Any) -> Any:
    known = safe_pickle.named(value)
    if known in _DTYPES:
        return _DTYPES[known]
    if safe_pickle.made(value) == _DTYPE and value.args and isinstance(value.args[0], str) and len(value.args[0]) < 32:
        try:
            dtype = np.dtype(value.args[0])
        except (TypeError, ValueError, SyntaxError) as error:
            raise safe_pickle.UntrustedPickleError(f"the dtype of field {name!r} does not exist") from error
        if dtype.kind in "biufcSUmMO" and dtype.names is None:
            return dtype.type
    raise safe_pickle.UntrustedPickleError(f"the dtype of field {name!r} is none of NumPy's scalars")


def _codec(name: str, value: Any) -> DataframeColumnCodec | None:
    if value is None:
        return None
    kind = safe_pickle.made(value)
    state = safe_pickle.state_of(value) if kind else {}
    if kind in registered_codecs:
        codec = registered_codecs[kind].__new__(registered_codecs[kind])
        vars(codec).update({key: _plain(name, item) for key, item in state.items() if isinstance(key, str)})
        return codec
    if kind == f"{_CODECS}ScalarCodec":
        return ScalarCodec(_spark_type(name, state.get("_spark_type")))
    if kind == f"{_CODECS}NdarrayCodec":
        return NdarrayCodec()
    if kind == f"{_CODECS}CompressedNdarrayCodec":
        return CompressedNdarrayCodec()
    if kind == f"{_CODECS}CompressedImageCodec":
        format, quality = state.get("_image_codec", ".png"), state.get("_quality", 80)
        if isinstance(format, str) and len(format) < 16 and type(quality) is int:
            return CompressedImageCodec(format, quality)
    raise safe_pickle.UntrustedPickleError(f"the codec of field {name!r} is none of petastorm's")


def _spark_type(name: str, value: Any) -> spark_types.SparkType:
    kind = safe_pickle.made(value) or safe_pickle.named(value)  # an instance; very old data sets have the class itself
    if not kind.startswith(_SPARK):
        raise safe_pickle.UntrustedPickleError(f"the ScalarCodec of field {name!r} has no Spark type")
    found = spark_types.SPARK_TYPES[kind[len(_SPARK) :]]
    if found is spark_types.DecimalType and isinstance(value, safe_pickle.PickledObject):
        state = safe_pickle.state_of(value)
        return spark_types.DecimalType(state.get("precision", 10), state.get("scale", 0))
    return found()


def _plain(name: str, value: Any) -> Any:
    """An attribute of a user's codec.

    A number, text, bytes, None, or a tuple or list of them.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (tuple, list)) and all(
        item is None or isinstance(item, (bool, int, float, str, bytes)) for item in value
    ):
        return type(value)(value)
    if safe_pickle.made(value).startswith(_SPARK):
        return _spark_type(name, value)
    raise safe_pickle.UntrustedPickleError(f"the codec of field {name!r} has an attribute that is not a plain value")


def dumps(schema: Unischema) -> bytes:
    """The pickle of a schema, as petastorm 0.13.1 reads it.

    Its parts have the names of petastorm, pyspark and NumPy 1. Neither petastorm nor pyspark need be installed;
    protocol 2.

    Raises:
        DataError: a dtype or an attribute of a codec cannot be written.
    """
    fields = OrderedDict((name, _described(field)) for name, field in schema.fields.items())
    stream = io.BytesIO()
    # petastorm's schemas have each field as an attribute too: the same object.
    _Pickler(stream, protocol=2).dump(_instance(_SCHEMA, {"_name": schema._name, "_fields": fields, **fields}))
    return stream.getvalue()


class _Pickler(pickle._Pickler):
    """Names a class as it says itself, without a look whether it can be imported."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


@functools.cache
def _class(name: str) -> Any:
    """A class that is pickled under a dotted name."""
    module, _, attribute = name.rpartition(".")
    return type(attribute, (), {"__module__": module})


class _Field(tuple[Any, ...]):
    """Pickled as petastorm's UnischemaField, a namedtuple."""

    __slots__ = ()

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)


_Field.__module__, _, _Field.__name__ = _FIELD.rpartition(".")


def _instance(name: str, state: Mapping[str, Any]) -> Any:
    made = _class(name)()
    vars(made).update(state)
    return made


def _described(field: UnischemaField) -> _Field:
    shape = tuple(length if length is None else int(length) for length in field.shape)
    return _Field((field.name, _class(_dtype_name(field)), shape, _codec_of(field), bool(field.nullable)))


def _dtype_name(field: UnischemaField) -> str:
    if field.numpy_dtype is Decimal:
        return "decimal.Decimal"
    try:
        scalar = np.dtype(field.numpy_dtype).type
    except TypeError as error:
        raise DataError(f"field {field.name!r}: {field.numpy_dtype!r} is not a NumPy dtype") from error
    name = {np.bool_: "bool_"}.get(scalar, np.dtype(scalar).name if scalar.__module__ == "numpy" else "")
    if scalar in {np.str_, np.bytes_, np.datetime64, np.timedelta64, np.object_}:
        name = scalar.__name__
    if f"numpy.{name}" not in _DTYPES:
        raise DataError(f"field {field.name!r}: petastorm has no dtype {field.numpy_dtype!r}")
    return f"numpy.{name}"


def _codec_of(field: UnischemaField) -> Any:
    codec, kind = field.codec, type(field.codec)
    if codec is None:
        return None
    own = next((name for name, known in registered_codecs.items() if known is kind), "")
    if own:
        return _instance(own, {key: _plain(field.name, value) for key, value in vars(codec).items()})
    if isinstance(codec, CompressedImageCodec):
        return _instance(
            f"{_CODECS}CompressedImageCodec", {"_image_codec": f".{codec.image_codec}", "_quality": codec.quality}
        )
    if kind is ScalarCodec:
        stored = codec.stored_type()
        decimals = {**vars(stored), "hasPrecisionInfo": True} if vars(stored) else {}
        return _instance(
            f"{_CODECS}ScalarCodec", {"_spark_type": _instance(f"{_SPARK}{type(stored).__name__}", decimals)}
        )
    if kind in {NdarrayCodec, CompressedNdarrayCodec}:
        return _instance(f"{_CODECS}{kind.__name__}", {})
    raise DataError(
        f"field {field.name!r} has a codec of your own, {kind.__name__}: call hvd_cluster.petastorm.codecs."
        f"register_codec({kind.__name__}) first, here and wherever the data is read"
    )
