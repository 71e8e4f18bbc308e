"""Compression of torch gradients for transfer."""

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
    """Compresses floating-point tensors to float16."""

    wire_dtype = torch.float16


class BF16Compressor(_TorchCastCompressor):
    """Compresses floating-point tensors to bfloat16, which has float32's range."""

    wire_dtype = torch.bfloat16


def wire_of(compression: type[Compressor]) -> torch.dtype | None:
    """The dtype of a compression that only converts; None for others.

    The engine converts while it copies.
    """
    return compression.wire_dtype if compression in (FP16Compressor, BF16Compressor) else None


class Compression:
    """The compressors for the ``compression`` argument of collectives and optimizers."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
