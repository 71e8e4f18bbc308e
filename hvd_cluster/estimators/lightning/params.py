"""The params of LightningEstimator that other estimators do not have."""

from __future__ import annotations

from typing import Any

from hvd_cluster.estimators import values
from hvd_cluster.estimators.params import COMMUNICATION, INPUT_SHAPES, OUTPUT_FN, SHARDING, TORCH_BACKEND
from hvd_cluster.estimators.stages.param_row import Row
from hvd_cluster.estimators.values import whole


def queue_size(value: Any) -> int | float:
    """A number of batches, or a share of the steps of an epoch.

    Raises:
        RuntimeError: it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise RuntimeError(
            f"async_data_loader_queue_size={value!r} is not a size: give a number of batches (int), or a share "
            "of the steps of an epoch (float)"
        )
    return value


def gpus(value: Any) -> int:
    """The number of GPUs of a worker."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in (0, 1):
        raise ValueError("must be 1, or 0 for the CPU: a worker trains on one GPU, so give more workers (num_proc)")
    return value


def arguments(value: Any) -> dict[str, Any]:
    """Keyword arguments."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a dict of keyword arguments")
    return dict(value)


_SHARE = "; passed to data_module (the reader of this package has a limit in bytes)"

LIGHTNING_ROWS = (
    INPUT_SHAPES,
    Row(
        "loss_constructors", None, "function without arguments that makes the loss, or a list of them", values.functions
    ),
    OUTPUT_FN,
    Row("train_minibatch_fn", None, "no effect: a LightningModule has its training_step", values.function),
    Row("scale_lr", False, "multiply the learning rates by the number of workers", values.flag),
    Row(
        "num_gpus",
        None,
        "GPUs of a worker: 1, or 0 for none; None: as use_gpu says",
        gpus,
        accessors=("NumGPUs", "NumGpus"),
    ),
    TORCH_BACKEND,
    SHARDING,
    COMMUNICATION,
    Row("logger", None, "a Lightning logger; None: TensorBoard's in the run's folder, if it is installed"),
    Row("log_every_n_steps", 50, "steps from one line of the logger to the next", whole(1)),
    Row("profiler", None, "a Lightning profiler, or its name"),
    Row("trainer_args", None, "arguments of the Trainer, which replace those of this package", arguments),
    Row("loader_num_epochs", None, "epochs of the loader; passed to data_module", whole(1)),
    Row("debug_data_loader", False, "let loaders report what they do; passed to data_module", values.flag),
    Row("train_async_data_loader_queue_size", None, "batches read ahead, or a share of the steps" + _SHARE, queue_size),
    Row("val_async_data_loader_queue_size", None, "the same for validation", queue_size),
)

#: For Horovod's import path: Horovod used the strategy of Lightning 1, which scaled the rates.
HOROVOD_ROWS = (Row("scale_lr", True, "multiply the learning rates by the number of workers", values.flag),)
