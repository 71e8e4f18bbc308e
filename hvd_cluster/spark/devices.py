"""The GPUs that Spark has assigned to a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_cluster.settings import Settings


def get_available_devices() -> list[str]:
    """The addresses of the GPUs of this worker's Spark task, or of the task itself.

    Empty without GPU scheduling. These are Spark's addresses, as ``spark.executor.resource.gpu.discoveryScript``
    reports them. In a worker CUDA_VISIBLE_DEVICES lists the job's GPUs of the host in the order of local ranks, so a
    program must select its device with ``torch.cuda.set_device(hvd.local_rank())`` and not by these addresses.
    """
    assigned = Settings.from_env().spark_gpus
    if assigned:
        return assigned.split(",")
    try:
        from pyspark import TaskContext
    except ImportError:
        return []
    context = TaskContext.get()
    return [] if context is None else task_gpus(context)


def task_gpus(context: Any) -> list[str]:
    """The addresses of the GPUs of the task with this context."""
    resources = context.resources()
    return [str(gpu) for gpu in resources["gpu"].addresses] if "gpu" in resources else []


def task_environment(gpus: Sequence[str]) -> dict[str, str]:
    """Variables that describe the task to its worker."""
    return {"HOROVOD_SPARK_WORK_DIR": str(Path.cwd()), **({"HOROVOD_SPARK_GPUS": ",".join(gpus)} if gpus else {})}
