"""Compression of gradients while they travel, on any backend of Keras."""

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
    """Sends floating-point tensors as float16."""

    wire_dtype = "float16"


class BF16Compressor(_KerasCastCompressor):
    """Sends floating-point tensors as bfloat16, which keeps float32's range."""

    wire_dtype = "bfloat16"


class Compression:
    """The compressions that come with the package, for the ``compression`` argument of optimizers and value ops."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
