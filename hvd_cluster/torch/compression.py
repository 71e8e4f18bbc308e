"""Compression of torch gradients while they travel."""

from __future__ import annotations

import torch

from hvd_cluster.engine.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "wire_of"]


class _TorchCastCompressor(CastCompressor):
    @staticmethod
    def describe(tensor: torch.Tensor) -> tuple[torch.dtype, bool]:
        return tensor.dtype, tensor.is_floating_point()

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class FP16Compressor(_TorchCastCompressor):
    """Sends floating-point tensors as float16."""

    wire_dtype = torch.float16


class BF16Compressor(_TorchCastCompressor):
    """Sends floating-point tensors as bfloat16, which keeps float32's range."""

    wire_dtype = torch.bfloat16


def wire_of(compression: type[Compressor]) -> torch.dtype | None:
    """The element type that the engine can convert to while it copies, if that is all that ``compression`` does."""
    return compression.wire_dtype if compression in (FP16Compressor, BF16Compressor) else None


class Compression:
    """The compressions that come with the package, for the ``compression`` argument of collectives and optimizers."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
