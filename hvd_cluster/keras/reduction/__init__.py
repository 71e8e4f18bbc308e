"""The reduction of a step's gradients, a file for each backend of Keras."""

from __future__ import annotations

import keras

from hvd_cluster.keras.reduction.reducer import Reduction


def reduction_of_backend() -> type[Reduction]:
    """The reduction for the backend that Keras runs on.

    Raises:
        NotImplementedError: the backend is not tensorflow, torch or jax.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from hvd_cluster.keras.reduction.tensorflow import TensorFlowReduction

        return TensorFlowReduction
    if backend == "torch":
        from hvd_cluster.keras.reduction.torch import TorchReduction

        return TorchReduction
    if backend == "jax":
        from hvd_cluster.keras.reduction.jax import JaxReduction

        return JaxReduction
    raise NotImplementedError(
        f"hvd_cluster.keras does not support the Keras backend {backend!r}: set KERAS_BACKEND to tensorflow, "
        "torch or jax"
    )


def forget_failed_step() -> None:
    """Let steps follow one in which a collective has failed.

    The variables have to be restored.
    """
    if keras.backend.backend() == "jax":
        from hvd_cluster.keras.reduction import jax

        jax.forget_failed_step()
