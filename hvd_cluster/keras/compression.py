"""Gradients made smaller for the wire, on any backend of Keras."""

from __future__ import annotations

from typing import Any

import keras


class Compressor:
    """How to make a tensor smaller, and back. Subclass it for a compression of your own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and whatever :meth:`decompress` needs to undo this."""
        raise TypeError("a Compressor has to define compress()")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received tensor in its original form."""
        raise TypeError("a Compressor has to define decompress()")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; integers go as they are."""

    wire_dtype: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return (keras.ops.cast(tensor, cls.wire_dtype) if "float" in dtype else tensor), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return keras.ops.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16."""

    wire_dtype = "float16"


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16, which keeps float32's range."""

    wire_dtype = "bfloat16"


class Compression:
    """The compressions that come with the package, for the ``compression`` argument of optimizers and value ops."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
