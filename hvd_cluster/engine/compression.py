"""Compression of gradients in transit: the base of every framework's compressors."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any


class Compressor:
    """How to make a tensor smaller, and back; subclass it for your own compression."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what :meth:`decompress` needs to undo this."""
        raise TypeError("a Compressor must define compress()")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received tensor in its original form."""
        raise TypeError("a Compressor must define decompress()")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; integers travel as they are."""

    wire_dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype, is_wide = cls.describe(tensor)
        return (cls.cast(tensor, cls.wire_dtype) if is_wide else tensor), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return cls.cast(tensor, ctx)

    @staticmethod
    @abstractmethod
    def describe(tensor: Any) -> tuple[Any, bool]:
        """The element type of a tensor, and whether it is one to be narrowed."""

    @staticmethod
    @abstractmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """The tensor with another element type."""
