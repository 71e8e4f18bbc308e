"""Try a Keras model on a few rows in the driver before workers run; needs Keras."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_cluster.data.schema import Schema
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.keras.arguments import with_arguments, with_dtypes
from hvd_cluster.estimators.keras.data import KerasColumns
from hvd_cluster.estimators.keras.framework import predict
from hvd_cluster.estimators.keras.packed_model import compilation_of
from hvd_cluster.estimators.keras.structure import flat, inputs_of, keys_of, output_keys, structured
from hvd_cluster.estimators.spec import Inputs, error_text, shapes_text
from hvd_cluster.estimators.torch.probe import wrong_outputs

#: Of a message of Keras that is quoted in an error.
_MAX_CHARACTERS = 2000


def try_model(
    model: Any,
    inputs: Inputs,
    label_shapes: tuple[tuple[int, ...], ...] | None,
    batch: Mapping[str, torch.Tensor],
    schema: Schema,
    made: Sequence[str] | None = None,
) -> tuple[KerasColumns, tuple[tuple[int, ...], ...]]:
    """Run a small batch through the eagerly compiled ``model``, its loss and metrics.

    Args:
        batch: columns of a few rows, as the reader yields them.
        label_shapes: of each label's batch; None: that of its output, if it has as many elements.
        made: the part of the batch that ``preprocess`` has made; None without it.

    Returns:
        How columns become the model's arguments, and the shape of one row of each output.

    Raises:
        DataError: the model or the loss does not fit the columns; the text has the columns' shapes and Keras's error.
    """
    keys = keys_of(inputs_of(model))
    if made is not None:
        inputs = with_arguments(inputs, model, {name: batch[name] for name in made})
    elif keys is not None and set(keys) == set(inputs.feature_cols):
        inputs = replace(inputs, feature_cols=keys)
    inputs = with_dtypes(model, inputs, batch)
    what = "the feature columns" if made is None else "what preprocess returns"
    try:
        # Only the features: the shapes of the labels depend on the outputs.
        features = [tensor.numpy() for tensor in inputs.tensors(batch, torch.device("cpu"))]
        raw = model(structured(features, keys), training=False)
    except Exception as error:  # the user's own model, which may raise anything
        raise _refused(f"the model does not take {what}", error, inputs, batch, schema) from error
    named = output_keys(raw, model, inputs.label_cols)
    outputs = flat(raw, named)
    shapes = tuple(tuple(output.shape[1:]) for output in outputs)
    has_more = named is not None and set(inputs.label_cols) < set(named)
    if text := wrong_outputs(outputs[: len(inputs.label_cols)] if has_more else outputs, inputs):
        raise DataError(f"{text}\n{shapes_text(inputs, batch, schema)}")
    if has_more and (text := _unassigned(compilation_of(model) or {}, inputs.label_cols, named or ())):
        raise DataError(text)
    shaped = tuple(
        (-1, *shape) if math.prod(batch[name].shape[1:]) == math.prod(shape) else None
        for name, shape in zip(inputs.label_cols, shapes, strict=False)
    )
    try:
        predict(model, inputs.tensors(batch, torch.device("cpu")), inputs.label_cols)
    except Exception as error:  # of the user's own predict_step, or of Keras
        raise _refused("the model cannot score rows as transform does", error, inputs, batch, schema) from error
    columns = KerasColumns(inputs=inputs, label_shapes=label_shapes or shaped, input_keys=keys, output_keys=named)
    try:
        model.test_on_batch(*columns.item(batch))
    except DataError:
        raise
    except Exception as error:  # the user's own loss
        raise _refused(
            "the loss or a metric does not take its output and label", error, inputs, batch, schema
        ) from error
    return columns, shapes


def _unassigned(compilation: Mapping[str, Any], labels: Sequence[str], names: Sequence[str]) -> str:
    """The mistake of losses or metrics for outputs without a label; empty if none."""
    wrong = [
        f"{param} must be a dict of the outputs that have a label, such as {{{labels[0]!r}: ...}}: the model also "
        f"returns {', '.join(repr(name) for name in names if name not in labels)}"
        for param in ("loss", "metrics")
        if (given := compilation.get(param)) and not (isinstance(given, Mapping) and set(given) <= set(labels))
    ]
    return "\n".join(wrong)


def _refused(
    complaint: str, error: Exception, inputs: Inputs, batch: Mapping[str, torch.Tensor], schema: Schema
) -> DataError:
    said = error_text(error)
    if len(said) > _MAX_CHARACTERS:  # Keras may print the rows themselves
        said = f"{said[: _MAX_CHARACTERS // 2]} [...] {said[-_MAX_CHARACTERS // 2 :]}"
    return DataError(f"{complaint}: {said}\n{shapes_text(inputs, batch, schema)}")
