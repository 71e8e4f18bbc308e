"""Runs a SavedModel, which Keras writes on TensorFlow and JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt


def serve(folder: Path, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The outputs of the folder's model by name, for inputs of the same rows.

    Each has the shape (rows, ...).
    """
    import tensorflow as tf

    found = tf.saved_model.load(str(folder)).signatures["serving_default"](
        **{name: tf.constant(value) for name, value in inputs.items()}
    )
    return {name: value.numpy() for name, value in found.items()}
