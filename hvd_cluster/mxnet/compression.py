"""Gradients made smaller for the wire."""

from __future__ import annotations

from typing import Any


class Compressor:
    """How to make an array smaller, and back. Subclass it for a compression of your own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array to send, and whatever :meth:`decompress` needs to undo this."""
        raise TypeError("a Compressor has to define compress()")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received array in its original form."""
        raise TypeError("a Compressor has to define decompress()")


class NoneCompressor(Compressor):
    """Sends arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point arrays as float16; integers go as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        is_wide = tensor.dtype.__name__ in ("float32", "float64")
        return (tensor.astype("float16") if is_wide else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.astype(ctx)


class Compression:
    """The compressions that come with the package, for the ``compression`` argument of a trainer."""

    none = NoneCompressor
    fp16 = FP16Compressor
