"""The GPU on which Keras computes, for any backend."""

from __future__ import annotations

import keras


def use_own_gpu(local_rank: int) -> None:
    """Let Keras compute on the worker's own GPU; no effect on a host without GPUs.

    Call it before the backend computes anything; later calls have no effect.

    Args:
        local_rank: index of the worker on this host.
    """
    if _has_gpu():
        use_device(local_rank)


def _has_gpu() -> bool:
    backend = keras.config.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    if backend == "torch":
        import torch

        return torch.cuda.is_available()
    if backend == "jax":
        import jax

        return bool(jax.default_backend() == "gpu")
    return False


def use_device(gpu: int | None) -> None:
    """Let Keras compute on one GPU of this host, or on the CPU.

    Call it before the backend computes anything; later calls have no effect.

    Args:
        gpu: index among the visible GPUs; None for the CPU.
    """
    backend = keras.config.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        visible = tf.config.list_physical_devices("GPU")
        chosen = [] if gpu is None else [visible[gpu]]
        if tf.config.get_visible_devices("GPU") != chosen:
            tf.config.set_visible_devices(chosen, "GPU")
        for device in chosen:
            tf.config.experimental.set_memory_growth(device, True)
    elif backend == "torch":
        import torch

        if gpu is not None:
            torch.cuda.set_device(gpu)
        elif torch.cuda.is_available():
            keras.device("cpu:0").__enter__()
    elif backend == "jax":
        import jax

        device = jax.devices("cpu")[0] if gpu is None else jax.local_devices(backend="gpu")[gpu]
        jax.config.update("jax_default_device", device)  # type: ignore[no-untyped-call]
