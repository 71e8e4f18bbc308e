"""The element types that collectives transfer, and substitutes for others."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_cluster.tensorflow.errors import InvalidRequestError

_FLOATS = {tf.float16, tf.bfloat16, tf.float32, tf.float64}
_INTEGERS = {tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64}
_TRANSFERRED = {tf.bool} | _FLOATS | _INTEGERS
_INSTEAD = {
    tf.string: "send text with hvd.broadcast_object() or hvd.allgather_object()",
    tf.complex64: "send tf.math.real() and tf.math.imag() of it",
    tf.complex128: "send tf.math.real() and tf.math.imag() of it",
}
_PARTS = {
    tf.RaggedTensor: "its flat_values and each of its nested_row_lengths()",
    tf.SparseTensor: "its indices and values, or tf.sparse.to_dense() of it",
}


def check_dtype(dtype: tf.DType, variable: str | None = None) -> None:
    """Refuse an element type that no collective transfers, also in a graph.

    Args:
        dtype: of the tensor.
        variable: the name of the variable that has the type, for the error.

    Raises:
        InvalidRequestError: no collective transfers it.
    """
    dtype = dtype.base_dtype
    if dtype in _TRANSFERRED:
        return
    text = f"Tensor type {dtype.name} is not supported."
    if dtype in _INSTEAD:
        text = f"{text[:-1]}: {_INSTEAD[dtype]}."
    if variable is not None:
        text += f" It is the type of the variable {variable!r}: leave this out."
    raise InvalidRequestError(None, None, text)


def check_is_one_tensor(value: Any) -> None:
    """Refuse a ragged or sparse tensor, which consists of several.

    Raises:
        InvalidRequestError: it is one.
    """
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            text = f"a tf.{kind.__name__} consists of several tensors: send {parts} with operations of their own"
            raise InvalidRequestError(None, None, text)
