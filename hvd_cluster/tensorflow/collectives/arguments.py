"""What users pass where a tensor is expected."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def dense(value: Any) -> tf.Tensor:
    """A dense tensor of a tensor, a variable of TensorFlow or Keras, an array or numbers."""
    if isinstance(value, tf.Tensor):
        return value
    # Keras's variables hold TensorFlow's.
    return tf.convert_to_tensor(value.value if hasattr(value, "value") and not callable(value.value) else value)


def any_rows(shape: tf.TensorShape) -> tf.TensorShape:
    """``shape`` with nothing known of its first dimension."""
    return tf.TensorShape([None, *shape[1:]]) if shape.rank else tf.TensorShape(None)
