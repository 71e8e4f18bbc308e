"""How scoring loads and calls Keras models. Importing this does not import Keras."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from hvd_cluster.estimators.keras.arguments import with_arguments
from hvd_cluster.estimators.keras.structure import as_tensor, flat, inputs_of, keys_of, output_keys, structured
from hvd_cluster.estimators.scoring.scorer import Framework
from hvd_cluster.topology import export


def predict(model: Any, features: list[torch.Tensor], order: Sequence[str] = ()) -> list[torch.Tensor]:
    """A Keras model's outputs as CPU tensors; a dict's as :func:`output_keys` says."""
    given = structured([feature.numpy() for feature in features], keys_of(inputs_of(model)))
    raw = model.predict_on_batch(given)
    outputs = flat(raw, output_keys(raw, model, order))
    return [as_tensor(output) for output in outputs]


KERAS = Framework(predict=predict, with_arguments=with_arguments)


def choose_backend(backend: str) -> None:
    """Make Keras use ``backend`` when it is imported; no effect if it already is."""
    if "keras" not in sys.modules:
        export({"KERAS_BACKEND": backend})


def load(folder: str, *, backend: str, custom_objects: bytes) -> Any:
    """The model in the folder of an MLflow model, not compiled.

    Args:
        backend: the backend that it was made on.
        custom_objects: pickle of name -> class or function that Keras cannot find by itself.
    """
    choose_backend(backend)
    import keras

    with keras.saving.custom_object_scope(cloudpickle.loads(custom_objects)):
        # It is the user's own model, and so is any code in it.
        return keras.models.load_model(Path(folder) / "data" / "model.keras", compile=False, safe_mode=False)
