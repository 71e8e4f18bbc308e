"""Gradients made smaller for the wire."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """How to make a tensor smaller, and back. Subclass it for a compression of your own."""

    wire_dtype: torch.dtype | None = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and whatever :meth:`decompress` needs to undo this."""
        raise TypeError("a Compressor has to define compress()")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received tensor in its original form."""
        raise TypeError("a Compressor has to define decompress()")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; integers go as they are."""

    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if tensor.is_floating_point() else tensor


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16, which keeps float32's range."""

    wire_dtype = torch.bfloat16


def wire_of(compression: type[Compressor]) -> torch.dtype | None:
    """The element type that the engine can convert to on the way, if that is all that ``compression`` does."""
    return compression.wire_dtype if compression in (FP16Compressor, BF16Compressor) else None


class Compression:
    """The compressions that come with the package, for the ``compression`` argument of collectives and optimizers."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
