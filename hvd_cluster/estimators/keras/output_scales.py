"""Whether a Keras model gives probabilities or logits, by losses or last layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_cluster.estimators.keras.structure import flat, outputs_of

#: Keras's losses that take each number for that of a class of its own.
_BINARY = {"BinaryCrossentropy", "BinaryFocalCrossentropy"}


def output_scales(model: Any, loss: Any, count: int, keys: Sequence[str] | None) -> tuple[str, ...]:
    """The scale of each output.

    It is one of :data:`~hvd_cluster.estimators.scoring.output_columns.SCALES`.

    Args:
        model: the fitted model.
        loss: as ``compile`` takes it.
        count: the number of outputs.
        keys: their names in order, if the model returns a dict.
    """
    if isinstance(loss, Mapping):
        loss = [loss.get(key) for key in keys or loss]
    losses = flat(loss) if isinstance(loss, (list, tuple)) else [loss] * count
    known = outputs_of(model)
    layers = [tensor._keras_history.operation for tensor in flat([] if known is None else known, keys)]
    if len(losses) != count:
        losses = [None] * count
    if len(layers) != count:
        layers = [None] * count
    return tuple(_by_loss(loss) or _by_layer(layer) for loss, layer in zip(losses, layers, strict=True))


def _by_loss(loss: Any) -> str:
    if isinstance(loss, str) or (callable(loss) and hasattr(loss, "__name__")):
        # Strings name Keras's own losses. Any other function may take logits, whatever its name is.
        is_of_keras = isinstance(loss, str) or (loss.__module__ or "").startswith("keras.")
        name = loss if isinstance(loss, str) else loss.__name__
        return "probability" if is_of_keras and "crossentropy" in name.replace("_", "").lower() else ""
    is_binary = any(cls.__name__ in _BINARY for cls in type(loss).__mro__)
    logit = "binary_logit" if is_binary else "logit"
    return {True: logit, False: "probability", None: ""}[getattr(loss, "from_logits", None)]


def _by_layer(layer: Any) -> str:
    names = {type(layer).__name__.lower(), getattr(getattr(layer, "activation", None), "__name__", "")}
    return "probability" if names & {"sigmoid", "hard_sigmoid", "softmax"} else ""
