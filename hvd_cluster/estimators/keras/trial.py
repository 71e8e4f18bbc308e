"""Tries a Keras model on a few rows in the driver, before any worker starts. Importing this needs Keras."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import torch

from hvd_cluster.data.schema import Schema
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.keras.data import KerasColumns, flat, inputs_of, keys_of, structured
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.torch.probe import shapes_text, wrong_outputs

#: Of a message of Keras that is quoted in an error.
_MAX_CHARACTERS = 2000


def try_model(
    model: Any,
    inputs: Inputs,
    label_shapes: tuple[tuple[int, ...], ...] | None,
    batch: Mapping[str, torch.Tensor],
    schema: Schema,
) -> tuple[KerasColumns, tuple[tuple[int, ...], ...]]:
    """Run one small batch through ``model``, which is compiled to run eagerly, its loss and its metrics.

    Args:
        batch: columns of a few rows, as the reader yields them.
        label_shapes: of each label's batch; None: that of its output, if it has as many elements.

    Returns:
        How columns become the model's arguments, and the shape of one row of each output.

    Raises:
        DataError: the model or the loss does not fit the columns; the text has the columns' shapes and Keras's error.
    """
    structure = inputs_of(model)
    keys = keys_of(structure)
    if keys is not None and set(keys) == set(inputs.feature_cols):
        inputs = replace(inputs, feature_cols=keys)
    inputs = _with_dtypes(flat(structure) if structure is not None else [], inputs, batch)
    try:
        # Only the features: the shapes of the labels depend on the outputs.
        features = [tensor.numpy() for tensor in inputs.features(batch, torch.device("cpu"))]
        raw = model(structured(features, keys), training=False)
    except Exception as error:  # the user's own model, which may raise anything
        raise _refused("the model does not take the feature columns", error, inputs, batch, schema) from error
    outputs = flat(raw, keys_of(raw))
    shapes = tuple(tuple(output.shape[1:]) for output in outputs)
    if text := wrong_outputs(outputs, inputs):
        raise DataError(f"{text}\n{shapes_text(inputs, batch, schema)}")
    shaped = tuple(
        (-1, *shape) if math.prod(batch[name].shape[1:]) == math.prod(shape) else None
        for name, shape in zip(inputs.label_cols, shapes, strict=True)
    )
    columns = KerasColumns(
        inputs=inputs, label_shapes=label_shapes or shaped, input_keys=keys, output_keys=keys_of(raw)
    )
    try:
        model.test_on_batch(*columns.item(batch))
    except DataError:
        raise
    except Exception as error:  # the user's own loss
        raise _refused(
            "the loss or a metric does not take its output and label", error, inputs, batch, schema
        ) from error
    return columns, shapes


def _with_dtypes(known: Sequence[Any], inputs: Inputs, batch: Mapping[str, torch.Tensor]) -> Inputs:
    """The inputs in the dtypes and shapes of a functional model's ``known`` ones; else as stored, in Keras's floats."""
    floating = keras.config.floatx()
    # JAX has int64 only if ``jax_enable_x64`` is set.
    whole = "int32" if keras.config.backend() == "jax" else "int64"

    def stored(name: str) -> str:
        dtype = batch[name].dtype
        return floating if dtype.is_floating_point else "bool" if dtype == torch.bool else whole

    dtypes = tuple(stored(name) for name in inputs.feature_cols)
    shapes: tuple[tuple[int, ...], ...] | None = None
    if len(known) == len(inputs.feature_cols):
        said = [str(one.dtype) for one in known]
        dtypes = tuple(name if name in vars(torch) else dtype for name, dtype in zip(said, dtypes, strict=True))
        sizes = [tuple(one.shape[1:]) for one in known]
        if all(None not in size for size in sizes):
            shapes = tuple((-1, *size) for size in sizes)
    labels = tuple(stored(name) for name in inputs.label_cols)
    return replace(inputs, feature_dtypes=dtypes, label_dtypes=labels, input_shapes=shapes)


def _refused(
    complaint: str, error: Exception, inputs: Inputs, batch: Mapping[str, torch.Tensor], schema: Schema
) -> DataError:
    said = str(error)
    if len(said) > _MAX_CHARACTERS:  # Keras may print the rows themselves
        said = f"{said[: _MAX_CHARACTERS // 2]} [...] {said[-_MAX_CHARACTERS // 2 :]}"
    return DataError(f"{complaint}: {type(error).__name__}: {said}\n{shapes_text(inputs, batch, schema)}")
