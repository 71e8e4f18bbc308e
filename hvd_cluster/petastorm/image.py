"""Images between compressed bytes and arrays, through Pillow; 16 bits a channel through our own PNG."""

from __future__ import annotations

import importlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.errors import MissingExtraError
from hvd_cluster.petastorm import png16

#: petastorm's names of formats, as file suffixes -> Pillow's.
FORMATS = {".png": "PNG", ".jpeg": "JPEG", ".jpg": "JPEG", ".bmp": "BMP", ".tiff": "TIFF", ".webp": "WEBP"}


def encode(image: npt.NDArray[Any], suffix: str, quality: int) -> bytes:
    """An image as a file's content.

    Args:
        image: shape (height, width) or (height, width, 3) in the order red, green, blue; uint8, or for PNG uint16.
        suffix: a key of FORMATS.
        quality: of JPEG and WebP, 1 to 100; the lossless formats take no notice.

    Raises:
        ValueError: the format cannot hold this dtype.
        MissingExtraError: Pillow is not installed.
    """
    if image.dtype == np.uint16:
        if suffix != ".png":
            raise ValueError(f"{suffix[1:]} holds 8 bits a channel, not 16: use png, or uint8")
        return png16.encode(image)
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

    Raises:
        ValueError: it is no image, or a damaged one.
        MissingExtraError: Pillow is not installed.
    """
    if png16.is_one(data):
        return png16.decode(data)
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
        raise ValueError(f"it is no whole image: {error}") from error


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError("pillow", "image", "to encode and decode images") from error
