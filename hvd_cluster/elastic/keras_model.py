"""The variables of Keras models and layers.

For ``tensorflow/`` and ``keras/``; imports no Keras at import time.
"""

from __future__ import annotations

from typing import Any


def built_optimizer(model: Any, optimizer: Any, state: str) -> Any:
    """The optimizer that trains ``model``, built; None if there is none.

    Args:
        model: a built model.
        optimizer: the user's optimizer; None for the optimizer that the model was compiled with, if any.
        state: the class name of the state, for the error.

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


def origin_of_optimizer(optimizer: Any) -> str:
    """The class of an optimizer that is not one of Keras 3, and what to do.

    For an error.
    """
    modules = [base.__module__ for base in type(optimizer).__mro__]
    name = type(optimizer).__name__
    if any(each.partition(".")[0] == "tf_keras" for each in modules):
        return (
            f"{name} of tf_keras, which is Keras 2: unset TF_USE_LEGACY_KERAS, so that tf.keras is Keras 3, or import "
            "keras instead of tf_keras"
        )
    if any(each.startswith("tensorflow.python.training.") for each in modules):
        return f"{name} of TensorFlow 1: use hvd_cluster.tensorflow.DistributedOptimizer"
    return name


def model_variables(model: Any, optimizer: Any = None) -> list[Any]:
    """The weights of a model and the state of its optimizer, up to date.

    Seeds of random layers and sums of metrics are not included: each rank has its own.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    return [*model.weights, *([] if optimizer is None else optimizer.variables)]


def variables_of_layers(layers: Any) -> list[Any]:
    """The trainable variables of a layer or a list of layers; none for None.

    Raises:
        ValueError: something else was given.
    """
    import keras

    given = [] if layers is None else layers if isinstance(layers, (list, tuple)) else [layers]
    wrong = [layer for layer in given if not isinstance(layer, keras.layers.Layer)]
    if wrong:
        raise ValueError(f"local_layers expects Keras layers, got {type(wrong[0]).__name__}")
    return [variable for layer in given for variable in layer.trainable_variables]
