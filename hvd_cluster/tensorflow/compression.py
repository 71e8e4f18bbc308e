"""Compression of TensorFlow gradients for transfer."""

from __future__ import annotations

import tensorflow as tf

from hvd_cluster.engine.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TensorFlowCastCompressor(CastCompressor):
    @staticmethod
    def describe(tensor: tf.Tensor) -> tuple[tf.DType, bool]:
        return tensor.dtype, tensor.dtype.is_floating

    @staticmethod
    def cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, dtype)


class FP16Compressor(_TensorFlowCastCompressor):
    """Compresses floating-point tensors to float16."""

    wire_dtype = tf.float16


class BF16Compressor(_TensorFlowCastCompressor):
    """Compresses floating-point tensors to bfloat16, which has float32's range."""

    wire_dtype = tf.bfloat16


class Compression:
    """The compressors of this package, for arguments ``compression``.

    Collectives and optimizers take them.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
