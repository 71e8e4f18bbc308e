"""Codecs: how a field's value becomes what a Parquet column holds, and back.

Their bytes are petastorm's. A codec of your own derives from :class:`DataframeColumnCodec`, and is read back only after
a call of :func:`register_codec`: a class that the metadata of a data set names is never imported.
"""

from __future__ import annotations

import datetime as dt
import functools
import io
import zipfile
import zlib
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import image, npy, spark_types, type_mapping
from hvd_cluster.petastorm.errors import DecodeFieldError
from hvd_cluster.petastorm.unischema_field import UnischemaField, python_value

#: "module.Class", as a pickled schema names it -> the codec class that the user vouched for.
registered_codecs: dict[str, type[DataframeColumnCodec]] = {}


class DataframeColumnCodec:
    """What all codecs have in common."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """The value as Parquet holds it.

        It is a number, str, bytes, ``Decimal``, date or datetime.

        Raises:
            DataError: the value is not what the field says.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it encodes")

    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """The value of a row, of the field's dtype and shape.

        Raises:
            DecodeFieldError: what Parquet holds is damaged, or not what the field says.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it decodes")

    def stored_type(self) -> spark_types.SparkType:
        """The type of the Parquet column."""
        return spark_types.BinaryType()

    def spark_dtype(self) -> Any:
        """The same as an instance of pyspark's class."""
        return type_mapping.data_type(self.stored_type())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ScalarCodec(DataframeColumnCodec):
    """A scalar in a column of a Spark type.

    Args:
        spark_type: an instance of one of :mod:`hvd_cluster.petastorm.spark_types`, or of pyspark's class.

    Raises:
        DataError: it is not a leaf type.
    """

    def __init__(self, spark_type: Any) -> None:
        self._spark_type = spark_types.from_spark(spark_type)

    def stored_type(self) -> spark_types.SparkType:
        return self._spark_type

    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        name, kind = unischema_field.name, self._spark_type
        if unischema_field.shape:
            raise DataError(f"field {name!r} has the shape {unischema_field.shape}: ScalarCodec stores scalars only")
        if isinstance(value, np.ndarray) and value.ndim:
            raise DataError(f"field {name!r} is to be a scalar, but is an array of shape {value.shape}")
        if not isinstance(value, np.datetime64):
            value = python_value(value)
        try:
            return _SCALARS[type(kind)](value)
        except (TypeError, ValueError, InvalidOperation, OverflowError) as error:
            raise DataError(f"field {name!r} is stored as {kind!r}, which cannot hold {value!r}: {error}") from error

    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        dtype = unischema_field.numpy_dtype
        try:
            if dtype is Decimal:
                return Decimal(value)
            if dtype is np.bytes_ and isinstance(value, str):
                return np.bytes_(value.encode())
            scalar = dtype if isinstance(dtype, type) and issubclass(dtype, np.generic) else np.dtype(dtype).type
            if isinstance(value, int) and issubclass(scalar, np.integer):
                whole = np.array(value, np.uint64 if value >= 1 << 63 else np.int64)
                return whole.astype(scalar)[()]  # wraps, where the class itself refuses
            return scalar(value)
        except (TypeError, ValueError, InvalidOperation, OverflowError) as error:
            raise DecodeFieldError(f"field {unischema_field.name!r}: {value!r} is no {dtype}: {error}") from error

    def __repr__(self) -> str:
        return f"ScalarCodec({self._spark_type!r})"


class NdarrayCodec(DataframeColumnCodec):
    """An array as the content of a .npy file."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytes:
        return npy.dump(_checked(unischema_field, value))

    def decode(self, unischema_field: UnischemaField, value: Any) -> npt.NDArray[Any]:
        try:
            return _fitting(unischema_field, npy.load(bytes(value)))
        except (ValueError, TypeError, SyntaxError) as error:
            raise _damaged(unischema_field, error) from error


class CompressedNdarrayCodec(DataframeColumnCodec):
    """An array as the content of a .npz file (a deflated .npy)."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytes:
        stream = io.BytesIO()
        np.savez_compressed(stream, arr=_checked(unischema_field, value))
        return stream.getvalue()

    def decode(self, unischema_field: UnischemaField, value: Any) -> npt.NDArray[Any]:
        try:
            with zipfile.ZipFile(io.BytesIO(bytes(value))) as archive:
                return _fitting(unischema_field, npy.load(archive.read("arr.npy")))
        except (ValueError, TypeError, SyntaxError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise _damaged(unischema_field, error) from error


class CompressedImageCodec(DataframeColumnCodec):
    """An image, red first, as the content of an image file.

    Its shape is (height, width) or (height, width, 3).

    Args:
        image_codec: "png" (uint8, uint16), or "jpeg" and other formats that Pillow writes (uint8).
        quality: of lossy formats, 1 to 100.

    Raises:
        DataError: there is no such format.
    """

    def __init__(self, image_codec: str = "png", quality: int = 80) -> None:
        self._image_codec = f".{str(image_codec).lower().lstrip('.')}"
        self._quality = int(quality)
        if self._image_codec not in image.FORMATS:
            known = ", ".join(suffix[1:] for suffix in image.FORMATS)
            raise DataError(f"there is no image codec {image_codec!r}: choose one of {known}")

    @property
    def image_codec(self) -> str:
        """The format's name."""
        return self._image_codec[1:]

    @property
    def quality(self) -> int:
        """Of lossy formats, 1 to 100."""
        return self._quality

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytes:
        array = _checked(unischema_field, value)
        if array.ndim not in {2, 3} or (array.ndim == 3 and array.shape[2] != 3):
            raise DataError(
                f"field {unischema_field.name!r} has the shape {array.shape}: images are (height, width) or (height, "
                "width, 3)"
            )
        try:
            return image.encode(array, self._image_codec, self._quality)
        except ValueError as error:
            raise DataError(f"field {unischema_field.name!r}: {error}") from error

    def decode(self, unischema_field: UnischemaField, value: Any) -> npt.NDArray[Any]:
        # As it was stored: images that others put into the column may differ from what the field says, and users rely
        # on getting them.
        try:
            return image.decode(bytes(value))
        except (ValueError, TypeError) as error:
            raise _damaged(unischema_field, error) from error

    def __repr__(self) -> str:
        return f"CompressedImageCodec({self.image_codec!r}, {self._quality})"


def register_codec(codec: Any, name: str = "") -> Any:
    """Let data sets name a codec class of yours; can be used as a decorator.

    Args:
        codec: the class; an instance is made without calling ``__init__`` and gets the attributes that were pickled.
        name: "module.Class" as the data set names it, where the class has moved since; default is its present place.

    Raises:
        DataError: it is not a codec class.
    """
    if not (isinstance(codec, type) and issubclass(codec, DataframeColumnCodec)):
        raise DataError(f"{codec!r} is not a class derived from DataframeColumnCodec")
    registered_codecs[name or f"{codec.__module__}.{codec.__qualname__}"] = codec
    return codec


def _integer(bits: int, value: Any) -> int:
    number = int(value)
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise ValueError(f"it has {bits} bits")
    return number


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"it is a {type(value).__name__}, not a str")
    return value


def _binary(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"it is a {type(value).__name__}, not bytes")
    return bytes(value)


def _decimal(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(str(value))


def _moment(value: Any) -> dt.datetime:
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]").item()
    if not isinstance(value, dt.datetime):
        raise TypeError(f"it is a {type(value).__name__}, not a datetime")
    return value


def _day(value: Any) -> dt.date:
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[D]").item()
    if isinstance(value, dt.datetime):
        return value.date()
    if not isinstance(value, dt.date):
        raise TypeError(f"it is a {type(value).__name__}, not a date")
    return value


_SCALARS: dict[type[spark_types.SparkType], Any] = {
    spark_types.BooleanType: bool,
    spark_types.ByteType: functools.partial(_integer, 8),
    spark_types.ShortType: functools.partial(_integer, 16),
    spark_types.IntegerType: functools.partial(_integer, 32),
    spark_types.LongType: functools.partial(_integer, 64),
    spark_types.FloatType: float,
    spark_types.DoubleType: float,
    spark_types.StringType: _text,
    spark_types.BinaryType: _binary,
    spark_types.DateType: _day,
    spark_types.TimestampType: _moment,
    spark_types.TimestampNTZType: _moment,
    spark_types.DecimalType: _decimal,
}


def _same_dtype(field: UnischemaField, dtype: np.dtype[Any]) -> bool:
    wanted = np.dtype(field.numpy_dtype)
    # Of text, bytes and times the class counts, not the length or unit.
    return dtype == wanted or (dtype.type is wanted.type and dtype.kind in "USMm")


def fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether an array of this shape fits a field of ``wanted``; None is any length."""
    return len(shape) == len(wanted) and all(length in {None, seen} for seen, length in zip(shape, wanted, strict=True))


def _checked(field: UnischemaField, value: Any) -> npt.NDArray[Any]:
    """The array that a field is to be.

    Raises:
        DataError: it is none, or of another dtype or shape.
    """
    if not isinstance(value, np.ndarray):
        raise DataError(f"field {field.name!r} is to be an array of {field.numpy_dtype}, not {type(value).__name__}")
    if not _same_dtype(field, value.dtype):
        raise DataError(f"field {field.name!r} is to hold {np.dtype(field.numpy_dtype)}, but holds {value.dtype}")
    if not fits(value.shape, tuple(field.shape)):
        raise DataError(f"field {field.name!r} is to have the shape {tuple(field.shape)}, but has {value.shape}")
    return value


def _fitting(field: UnischemaField, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A decoded array, which must be of the field's dtype and shape."""
    if not _same_dtype(field, array.dtype) or not fits(array.shape, tuple(field.shape)):
        raise ValueError(
            f"it holds {array.dtype} of shape {array.shape}, not {np.dtype(field.numpy_dtype)} of {tuple(field.shape)}"
        )
    return array


def _damaged(field: UnischemaField, error: Exception) -> DecodeFieldError:
    return DecodeFieldError(f"field {field.name!r} cannot be decoded: {error}")
