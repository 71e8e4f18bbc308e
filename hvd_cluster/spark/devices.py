"""The GPUs that Spark has assigned to a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_cluster.settings import Settings


def get_available_devices() -> list[str]:
    """The addresses of the GPUs of this worker's Spark task, or of the task itself; none without GPU scheduling.

    Spark's own addresses, as ``spark.executor.resource.gpu.discoveryScript`` reports them. In a worker
    CUDA_VISIBLE_DEVICES lists the job's GPUs of the host in the order of local ranks, so that a program counts devices
    as ``torch.cuda.set_device(hvd.local_rank())`` does, and not by these addresses.
    """
    told = Settings.from_env().spark_gpus
    if told:
        return told.split(",")
    try:
        from pyspark import TaskContext
    except ImportError:
        return []
    context = TaskContext.get()
    return [] if context is None else task_gpus(context)


def task_gpus(context: Any) -> list[str]:
    """The addresses of the GPUs of the task whose context this is."""
    resources = context.resources()
    return [str(gpu) for gpu in resources["gpu"].addresses] if "gpu" in resources else []


def task_environment(gpus: Sequence[str]) -> dict[str, str]:
    """What tells a worker of the task that runs it.

    Args:
        gpus: those of the task's GPUs that are the worker's.
    """
    return {"HOROVOD_SPARK_WORK_DIR": str(Path.cwd()), **({"HOROVOD_SPARK_GPUS": ",".join(gpus)} if gpus else {})}
