from __future__ import annotations

import datetime as dt
import io
import struct
import zlib
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import image, npy
from hvd_cluster.petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
from hvd_cluster.petastorm.errors import DecodeFieldError
from hvd_cluster.petastorm.spark_types import (
    BinaryType,
    ByteType,
    DateType,
    DecimalType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
)
from hvd_cluster.petastorm.unischema import UnischemaField

RANDOM = np.random.RandomState(1)


def field(dtype: Any, shape: tuple[int | None, ...], codec: Any) -> UnischemaField:
    return UnischemaField("x", dtype, shape, codec, False)


@pytest.mark.parametrize("codec", [NdarrayCodec(), CompressedNdarrayCodec()])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(RANDOM.rand(3, 4)),
        np.array(5.0),
        np.zeros((0, 3), np.float32),
        np.array(["a", "bcd"]),
        np.array([True, False]),
        np.arange(4, dtype=">i4"),
        np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]"),
    ],
)
def test_arrays_survive(codec: NdarrayCodec | CompressedNdarrayCodec, array: np.ndarray) -> None:
    described = field(array.dtype.type if array.dtype.kind in "UM" else array.dtype, array.shape, codec)
    again = codec.decode(described, codec.encode(described, array))
    np.testing.assert_array_equal(again, array)
    assert again.dtype == array.dtype
    assert again.flags.writeable


@pytest.mark.parametrize("codec", [NdarrayCodec(), CompressedNdarrayCodec(), CompressedImageCodec("png")])
def test_an_array_that_is_not_what_the_field_says_is_refused(codec: Any) -> None:
    described = field(np.uint8, (2, None), codec)
    for value in (np.zeros((3, 2), np.uint8), np.zeros(2, np.uint8), np.zeros((2, 2), np.int8), [[1]], 5):
        with pytest.raises(DataError, match="'x'"):
            codec.encode(described, value)


@pytest.mark.parametrize("codec", [NdarrayCodec(), CompressedNdarrayCodec(), CompressedImageCodec("png")])
def test_damaged_bytes_are_named(codec: Any) -> None:
    described = field(np.uint8, (40, 40), codec)
    data = codec.encode(described, RANDOM.randint(0, 255, (40, 40)).astype(np.uint8))
    for broken in (b"", b"x", data[: len(data) // 2], b"\x00" * 200):
        with pytest.raises(DecodeFieldError, match="'x'"):
            codec.decode(described, broken)


def test_an_array_of_objects_is_not_unpickled() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        npy.load(stream.getvalue())


@pytest.mark.parametrize(
    ("stored", "dtype", "value", "encoded", "decoded"),
    [
        (IntegerType(), np.int32, np.int64(5), 5, np.int32(5)),
        (IntegerType(), np.uint16, 65535, 65535, np.uint16(65535)),
        (ByteType(), np.uint8, -1, -1, np.uint8(255)),
        (FloatType(), np.float32, 1, 1.0, np.float32(1)),
        (StringType(), np.str_, np.str_("\u00e9"), "\u00e9", np.str_("\u00e9")),
        (StringType(), np.bytes_, "abc", "abc", np.bytes_(b"abc")),
        (BinaryType(), np.bytes_, b"\x00\x01", b"\x00\x01", np.bytes_(b"\x00\x01")),
        (BinaryType(), np.bytes_, np.bytes_(b"ab\0\0"), b"ab\0\0", np.bytes_(b"ab\0\0")),
        (StringType(), np.str_, np.str_("ab\0"), "ab\0", np.str_("ab\0")),
        (DecimalType(6, 2), Decimal, 1.1, Decimal("1.1"), Decimal("1.1")),
        (DateType(), np.datetime64, np.datetime64("2020-02-03"), dt.date(2020, 2, 3), np.datetime64("2020-02-03")),
        (
            TimestampType(),
            np.datetime64,
            np.datetime64("2020-02-03T04:05:06"),
            dt.datetime.fromisoformat("2020-02-03T04:05:06"),
            np.datetime64("2020-02-03T04:05:06"),
        ),
    ],
)
def test_scalars_survive(stored: Any, dtype: Any, value: Any, encoded: Any, decoded: Any) -> None:
    codec = ScalarCodec(stored)
    described = field(dtype, (), codec)
    assert codec.encode(described, value) == encoded
    assert type(codec.encode(described, value)) is type(encoded)
    again = codec.decode(described, encoded)
    assert again == decoded
    assert type(again) is type(decoded)


@pytest.mark.parametrize("value", [2**64 - 1, -1])
def test_unsigned_numbers_beyond_int64_are_decoded_however_they_are_stored(value: int) -> None:
    assert ScalarCodec(LongType()).decode(field(np.uint64, (), None), value) == np.uint64(2**64 - 1)


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (ByteType(), 200),
        (IntegerType(), "five"),
        (IntegerType(), np.zeros(3)),
        (StringType(), 5),
        (BinaryType(), "text"),
        (DecimalType(), "one"),
        (DateType(), "today"),
        (TimestampType(), dt.date(2020, 1, 1)),
    ],
)
def test_a_scalar_that_does_not_fit_is_refused(stored: Any, value: Any) -> None:
    with pytest.raises(DataError, match="'x'"):
        ScalarCodec(stored).encode(field(np.int64, (), None), value)


def test_what_is_not_a_leaf_type_is_refused() -> None:
    for wrong in (int, IntegerType, "int", None):
        with pytest.raises(DataError, match="IntegerType"):
            ScalarCodec(wrong)
    with pytest.raises(DataError, match="DecimalType"):
        DecimalType(50, 2)
    with pytest.raises(DataError, match="image codec"):
        CompressedImageCodec("gif87")


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_png_keeps_every_bit(shape: tuple[int, ...], dtype: Any) -> None:
    codec = CompressedImageCodec("png")
    described = field(dtype, shape, codec)
    pixels = RANDOM.randint(0, np.iinfo(dtype).max + 1, shape).astype(dtype)
    np.testing.assert_array_equal(codec.decode(described, codec.encode(described, pixels)), pixels)


def test_jpeg_is_red_first_and_close() -> None:
    codec = CompressedImageCodec("jpeg", 95)
    described = field(np.uint8, (16, 16, 3), codec)
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[..., 0] = 200
    data = codec.encode(described, pixels)
    assert Image.open(io.BytesIO(data)).format == "JPEG"
    again = codec.decode(described, data).astype(int)
    assert np.abs(again - pixels).max() < 8
    worse = CompressedImageCodec("jpeg", 5)
    noise = RANDOM.randint(0, 256, (16, 16, 3)).astype(np.uint8)
    assert len(worse.encode(described, noise)) < len(codec.encode(described, noise))
    with pytest.raises(DataError, match="8 bits"):
        codec.encode(field(np.uint16, (2, 2), codec), np.zeros((2, 2), np.uint16))


def test_images_of_other_modes_come_as_grey_or_colour() -> None:
    for mode, shape in {"1": (2, 3), "LA": (2, 3), "P": (2, 3, 3), "CMYK": (2, 3, 3), "RGBA": (2, 3, 4)}.items():
        stream = io.BytesIO()
        Image.new(mode, (3, 2)).save(stream, "JPEG" if mode == "CMYK" else "PNG")
        assert image.decode(stream.getvalue()).shape == shape


@pytest.mark.parametrize("kind", range(5))
def test_every_row_filter_of_16_bit_png_is_undone(kind: int) -> None:
    pixels = RANDOM.randint(0, 65536, (6, 4, 3)).astype(np.uint16)
    rows = pixels.astype(">u2").view(np.uint8).reshape(6, -1).astype(int)
    filtered = b""
    for y, row in enumerate(rows):
        up = rows[y - 1] if y else np.zeros_like(row)
        left, corner = np.r_[np.zeros(6, int), row[:-6]], np.r_[np.zeros(6, int), up[:-6]]
        paeth = [min((a, b, c), key=lambda n: abs(a + b - c - n)) for a, b, c in zip(left, up, corner, strict=True)]
        guess = [0, left, up, (left + up) // 2, np.array(paeth)][kind]
        filtered += bytes([kind]) + ((row - guess) % 256).astype(np.uint8).tobytes()
    header = struct.pack(">IIBBBBB", 4, 6, 16, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"tEXt", b"a\0b"), (b"IDAT", zlib.compress(filtered)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    np.testing.assert_array_equal(image.decode_png16(data), pixels)
    with pytest.raises(ValueError, match="damaged"):
        image.decode_png16(data.replace(b"a\0b", b"a\0c"))


def test_a_16_bit_png_is_one_for_others_too() -> None:
    grey = RANDOM.randint(0, 65536, (5, 4)).astype(np.uint16)
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(image.encode_png16(grey)))), grey)


def test_a_png_that_claims_to_be_huge_is_refused() -> None:
    data = bytearray(image.encode_png16(np.zeros((2, 2), np.uint16)))
    data[16:24] = struct.pack(">II", 60000, 60000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    with pytest.raises(ValueError, match="not supported"):
        image.decode_png16(bytes(data))
