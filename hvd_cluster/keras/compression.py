"""Compression of gradients for transfer, on any backend of Keras."""

from __future__ import annotations

from typing import Any

import keras

from hvd_cluster.engine.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _KerasCastCompressor(CastCompressor):
    @staticmethod
    def describe(tensor: Any) -> tuple[str, bool]:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return dtype, "float" in dtype

    @staticmethod
    def cast(tensor: Any, dtype: str) -> Any:
        return keras.ops.cast(tensor, dtype)


class FP16Compressor(_KerasCastCompressor):
    """Compresses floating-point tensors to float16."""

    wire_dtype = "float16"


class BF16Compressor(_KerasCastCompressor):
    """Compresses floating-point tensors to bfloat16, which has float32's range."""

    wire_dtype = "bfloat16"


class Compression:
    """The compressors of this package, for arguments ``compression``.

    Optimizers and value ops take them.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
