"""Images between compressed bytes and arrays, through Pillow.

PNG with 16 bits a channel, which Pillow reads as 8 bits or not at all, has its own codec here. The format:
https://www.w3.org/TR/png-3/.
"""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.errors import MissingExtraError

#: petastorm's names of formats, as file suffixes -> Pillow's.
FORMATS = {".png": "PNG", ".jpeg": "JPEG", ".jpg": "JPEG", ".bmp": "BMP", ".tiff": "TIFF", ".webp": "WEBP"}


def encode(image: npt.NDArray[Any], suffix: str, quality: int) -> bytes:
    """An image as a file's content.

    Args:
        image: shape (height, width) or (height, width, 3) in the order red, green, blue; uint8, or for PNG uint16.
        suffix: a key of FORMATS.
        quality: of JPEG and WebP, 1 to 100; lossless formats ignore it.
    """
    if image.dtype == np.uint16:
        if suffix != ".png":
            raise ValueError(f"{suffix[1:]} holds 8 bits a channel, not 16: use png, or uint8")
        return encode_png16(image)
    if image.dtype != np.uint8:
        raise ValueError(f"images hold uint8 or uint16, not {image.dtype}")
    stream = io.BytesIO()
    options: dict[str, Any] = {"quality": quality} if FORMATS[suffix] in {"JPEG", "WEBP"} else {}
    _pillow().fromarray(np.ascontiguousarray(image)).save(stream, FORMATS[suffix], **options)
    return stream.getvalue()


def decode(data: bytes) -> npt.NDArray[Any]:
    """The image in a file's content.

    Returns:
        uint8 or uint16; shape (height, width), (height, width, 3) in the order red, green, blue, or (height, width, 4).
    """
    if is_png16(data):
        return decode_png16(data)
    pillow = _pillow()
    try:
        # Only what petastorm can have written: the rarer decoders have had holes.
        with pillow.open(io.BytesIO(data), formats=tuple(sorted(set(FORMATS.values())))) as image:
            if image.mode in {"1", "LA", "La"}:
                image = image.convert("L")
            elif image.mode not in {"L", "RGB", "RGBA"}:
                image = image.convert("RGB")
            return np.array(image)
    except (OSError, SyntaxError, pillow.DecompressionBombError) as error:  # SyntaxError: what Pillow says of bad PNG
        raise ValueError(f"the image is damaged or truncated: {error}") from error


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError("pillow", "image", "to encode and decode images") from error


_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: PNG's colour types -> channels, for those that petastorm can write.
_CHANNELS = {0: 1, 2: 3, 6: 4}
#: An image decodes to this many bytes at most: a small file must not fill the memory.
_MAX_BYTES = 1 << 30


def is_png16(data: bytes) -> bool:
    """Whether a file's content begins as a PNG with 16 bits a channel."""
    return data[:8] == _SIGNATURE and len(data) >= 33 and data[12:16] == b"IHDR" and data[24] == 16


def encode_png16(image: npt.NDArray[np.uint16]) -> bytes:
    """An image as a PNG file's content, each row filtered by "up".

    Its shape is (height, width) or (height, width, 3).
    """
    height, width = image.shape[:2]
    rows = np.ascontiguousarray(image, dtype=">u2").view(np.uint8).reshape(height, -1)
    filtered = np.empty((height, rows.shape[1] + 1), np.uint8)
    filtered[:, 0] = 2
    filtered[:1, 1:] = rows[:1]
    filtered[1:, 1:] = rows[1:] - rows[:-1]
    header = struct.pack(">IIBBBBB", width, height, 16, 0 if image.ndim == 2 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 6)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, body) for kind, body in chunks)


def decode_png16(data: bytes) -> npt.NDArray[np.uint16]:
    """The image; shape (height, width) or (height, width, channels)."""
    width, height, _, colour, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    if colour not in _CHANNELS or interlaced:
        raise ValueError(f"a 16-bit PNG of colour type {colour}{', interlaced' if interlaced else ''} is not supported")
    channels = _CHANNELS[colour]
    row_bytes = width * channels * 2
    expected = height * (row_bytes + 1)
    if not expected or expected > _MAX_BYTES:
        raise ValueError(f"a PNG of {width} x {height} pixels is not supported")
    packed = b"".join(body for kind, body in _chunks(data) if kind == b"IDAT")
    try:
        raw = zlib.decompressobj().decompress(packed, expected)
    except zlib.error as error:
        raise ValueError(f"its pixels are damaged: {error}") from error
    if len(raw) != expected:
        raise ValueError(f"it is cut short: {len(raw)} bytes of {expected}")
    lines = np.frombuffer(raw, np.uint8).reshape(height, row_bytes + 1)
    rows = np.zeros((height + 1, row_bytes), np.uint8)  # the row above the first is zeros
    for index, line in enumerate(lines):
        rows[index + 1] = _unfiltered(int(line[0]), line[1:], rows[index], channels * 2)
    pixels = rows[1:].view(">u2").astype(np.uint16).reshape(height, width, channels)
    return pixels[:, :, 0] if channels == 1 else pixels


def _chunks(data: bytes) -> Any:
    """(kind, body) of each chunk."""
    at = 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if zlib.crc32(kind + body) != int.from_bytes(data[at + 8 + size : at + 12 + size], "big"):
            raise ValueError(f"its chunk {kind!r} is damaged")
        yield kind, body
        at += 12 + size


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _unfiltered(
    kind: int, line: npt.NDArray[np.uint8], above: npt.NDArray[np.uint8], pixel_bytes: int
) -> npt.NDArray[np.uint8]:
    """A row's bytes, shape (n,), from the filtered ones and the row above."""
    if kind == 0:
        return line
    if kind == 1:  # sub: sums along the row, of each byte of a pixel by itself, modulo 256
        return np.add.accumulate(line.reshape(-1, pixel_bytes), axis=0, dtype=np.uint8).reshape(-1)
    if kind == 2:
        return line + above
    if kind not in {3, 4}:
        raise ValueError(f"its row filter {kind} does not exist")
    # Average and Paeth need the byte that was just worked out: pixel by pixel.
    row = [0] * pixel_bytes + line.tolist()
    up = [0] * pixel_bytes + above.tolist()
    for at in range(pixel_bytes, len(row)):
        left, over, corner = row[at - pixel_bytes], up[at], up[at - pixel_bytes]
        row[at] = (row[at] + ((left + over) // 2 if kind == 3 else _paeth(left, over, corner))) & 255
    return np.array(row[pixel_bytes:], np.uint8)


def _paeth(left: int, over: int, corner: int) -> int:
    """The neighbour nearest to left + over - corner."""
    guess = left + over - corner
    far_left, far_over, far_corner = abs(guess - left), abs(guess - over), abs(guess - corner)
    if far_left <= far_over and far_left <= far_corner:
        return left
    return over if far_over <= far_corner else corner
