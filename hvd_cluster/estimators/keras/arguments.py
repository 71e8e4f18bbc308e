"""The order, dtypes and shapes in which a Keras model gets its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.keras.structure import flat, inputs_of, keys_of
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.torch.arguments import partial_text

#: NumPy has no bfloat16: Keras casts what it gets to the dtype of its input.
_IN_NUMPY = {"bfloat16": "float32"}


def with_arguments(inputs: Inputs, model: Any, made: Mapping[str, torch.Tensor]) -> Inputs:
    """The inputs, with what ``preprocess`` has returned as the model's arguments.

    They go to the inputs of their names, if these are all the model's inputs; otherwise in the order of the feature
    columns, if these are their names, or else in the order of ``made``, if none is the name of an input.

    Raises:
        DataError: some are names of inputs, and others are not.
    """
    structure = inputs_of(model)
    names = keys_of(structure) or tuple(one.name for one in ([] if structure is None else flat(structure)))
    same = [order for order in (names, inputs.feature_cols) if set(order) == set(made) and len(order) == len(made)]
    if not same and len(made) > 1 and set(made) & set(names):
        raise DataError(partial_text("inputs", [name for name in made if name not in names], names))
    inputs = replace(inputs, made=same[0] if same else tuple(made))
    return with_dtypes(model, inputs, made)


def with_dtypes(model: Any, inputs: Inputs, batch: Mapping[str, torch.Tensor]) -> Inputs:
    """The inputs in a functional model's dtypes and shapes.

    For other models, they are as in ``batch``, with floats of Keras's dtype.
    """
    import keras

    structure = inputs_of(model)
    known: Sequence[Any] = [] if structure is None else flat(structure)
    floating = _IN_NUMPY.get(keras.config.floatx(), keras.config.floatx())
    # JAX has int64 only if ``jax_enable_x64`` is set.
    whole = "int32" if keras.config.backend() == "jax" else "int64"

    def stored(name: str) -> str:
        dtype = batch[name].dtype
        return floating if dtype.is_floating_point else "bool" if dtype == torch.bool else whole

    dtypes = tuple(stored(name) for name in inputs.arguments)
    shapes: tuple[tuple[int, ...], ...] | None = None
    if len(known) == len(inputs.arguments):
        said = [_IN_NUMPY.get(str(one.dtype), str(one.dtype)) for one in known]
        dtypes = tuple(name if name in vars(torch) else dtype for name, dtype in zip(said, dtypes, strict=True))
        sizes = [tuple(one.shape[1:]) for one in known]
        if all(None not in size for size in sizes):
            shapes = tuple((-1, *size) for size in sizes)
    labels = tuple(stored(name) for name in inputs.label_cols if name in batch)
    return replace(inputs, feature_dtypes=dtypes, label_dtypes=labels, input_shapes=shapes)
