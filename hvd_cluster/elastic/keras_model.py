"""The variables of a Keras model in training, for the states of every framework; does not import Keras."""

from __future__ import annotations

from typing import Any


def built_optimizer(model: Any, optimizer: Any, state: str) -> Any:
    """The optimizer that trains ``model``, built; None if there is none.

    Args:
        model: a built model.
        optimizer: the user's; None for the model's own, if it is compiled.
        state: the name of the state, for the message.

    Raises:
        ValueError: the model is not built.
    """
    if not model.built:
        raise ValueError(
            "Model must be built first. Run `model.build(input_shape)`, or call it on a batch, before it is handed "
            f"to {state}."
        )
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer


def model_variables(model: Any, optimizer: Any = None) -> list[Any]:
    """The weights of a model and the state of its optimizer, holding what the last step has made of them.

    Seeds of random layers and sums of metrics are not among them: those are each rank's own.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    return [*model.weights, *([] if optimizer is None else optimizer.variables)]
