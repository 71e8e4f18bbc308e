"""Compression of MXNet gradients for transfer."""

from __future__ import annotations

from typing import Any

from hvd_cluster.engine.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Compresses floating-point arrays to float16; integers are not compressed."""

    wire_dtype = "float16"

    @staticmethod
    def describe(tensor: Any) -> tuple[Any, bool]:
        return tensor.dtype, tensor.dtype.__name__ in ("float32", "float64")

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class Compression:
    """The compressors of this package, for the ``compression`` argument of a trainer."""

    none = NoneCompressor
    fp16 = FP16Compressor
