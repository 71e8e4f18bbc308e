"""Slots for workers on a Spark cluster, and messages about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hvd_cluster.errors import LaunchError, NotEnoughSlotsError


@dataclass(frozen=True, kw_only=True)
class SlotCounts:
    """How many tasks a cluster can run at once."""

    #: Tasks that the present executors can run at once; None if the session does not know.
    total: int | None = None
    #: How many of ``total`` run something else now.
    busy: int = 0
    #: The maximum that this session can ever have, from its settings; None if more executors may start.
    max_total: int | None = None
    #: ``spark.dynamicAllocation.enabled`` on a cluster; Spark refuses barrier stages with it.
    dynamic_allocation: bool = False
    #: ``spark.master``, for messages.
    master: str = ""
    #: GPUs that each task requests.
    gpus_per_task: float = 0.0
    #: The automatic scaling of the cluster, in words: "2 to 8 nodes"; empty without it.
    autoscaling: str = ""

    @property
    def free(self) -> int | None:
        """Tasks that could start now."""
        return None if self.total is None else max(0, self.total - self.busy)

    def enough(self, needed: int) -> bool:
        """True unless it is known that ``needed`` tasks cannot run at once now."""
        return self.total is None or self.total >= needed

    def describe(self, needed: int) -> str:
        """A sentence such as "8 slots needed, 6 free; dynamic allocation is on"."""
        parts = [f"{needed} slots needed, {'an unknown number' if self.free is None else self.free} free"]
        if self.busy:
            parts.append(f"{self.busy} of {self.total} are busy with other tasks")
        if self.gpus_per_task:
            parts.append(f"each task takes {self.gpus_per_task:g} GPU")
        parts.append(f"dynamic allocation is {'on' if self.dynamic_allocation else 'off'}")
        if self.autoscaling:
            parts.append(f"the cluster scales itself ({self.autoscaling})")
        if self.master:
            parts.append(f"spark.master is {self.master}")
        return "; ".join(parts)

    def describe_wait(self, needed: int) -> str:
        """:meth:`describe`, and what tasks wait for although their slots are free."""
        text = self.describe(needed)
        if self.free is None or self.free < needed:
            return text
        return f"{text}; that is enough, so Spark is still starting Python in its tasks, which is slow on a busy host"


def check(needed: int, slots: SlotCounts, *, barrier: bool = True) -> None:
    """Refuse a job that can never start.

    Raises:
        NotEnoughSlotsError: the session can never have ``needed`` slots.
        LaunchError: the session's settings do not allow barrier stages.
    """
    if slots.dynamic_allocation and barrier:
        text = (
            f"{slots.describe(needed)}. Spark starts all workers at once (a barrier stage) and refuses to do so with "
            "dynamic allocation: set spark.dynamicAllocation.enabled=false and ask for enough executors with "
            "spark.executor.instances; or use run_elastic, whose workers start one by one"
        )
        raise (LaunchError if slots.enough(needed) else NotEnoughSlotsError)(text)
    if slots.max_total is not None and needed > slots.max_total:
        raise NotEnoughSlotsError(
            f"{slots.describe(needed)}. This session can have at most {slots.max_total}: {remedy(slots)}, "
            f"or pass num_proc={slots.max_total}"
        )


def remedy(slots: SlotCounts) -> str:
    """What to change to get more slots."""
    if slots.master.startswith("local"):
        return "start it with more cores, e.g. master('local[8]')"
    number = "spark.dynamicAllocation.maxExecutors" if slots.dynamic_allocation else "spark.executor.instances"
    return f"ask for more executors ({number}, spark.cores.max) or for more cores of each"


def of_master(master: str, cpus_per_task: int = 1) -> int | None:
    """The slots of a ``local...`` master, from its name; otherwise None.

    Also None for ``local[*]``.
    """
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*]", master)
    if cluster:
        return int(cluster[1]) * (int(cluster[2]) // cpus_per_task)
    local = re.fullmatch(r"local(?:\[(\d+)(?:\s*,\s*\d+)?])?", master)
    return int(local[1] or 1) // cpus_per_task if local else None


def with_profile(slots: SlotCounts, profile: Any) -> SlotCounts:
    """``slots`` without what a ``pyspark.resource.ResourceProfile`` makes unknown."""
    if profile is None:
        return slots
    gpus = profile.taskResources.get("gpu")
    return replace(slots, total=None, max_total=None, gpus_per_task=float(gpus.amount) if gpus is not None else 0.0)


def with_total(slots: SlotCounts, total: int, busy: int) -> SlotCounts:
    """``slots`` of a session that knows its present number of slots and busy ones."""
    # Some clusters provide more than the settings request.
    return replace(
        slots, total=total, busy=busy, max_total=None if slots.max_total is None else max(slots.max_total, total)
    )


def of_settings(conf: Callable[[str], str | None]) -> SlotCounts:
    """What the settings of a session say, for sessions that provide no more."""
    master = conf("spark.master") or ""
    cpus_per_task = int(conf("spark.task.cpus") or 1)
    gpus_per_task = float(conf("spark.task.resource.gpu.amount") or 0)
    max_total = of_master(master, cpus_per_task)
    on_cluster = max_total is None and not master.startswith("local")
    # Spark itself ignores the setting if the executors are in one process.
    dynamic = (conf("spark.dynamicAllocation.enabled") or "").lower() == "true" and not re.fullmatch(
        r"local(\[[^,\]]*(,\s*\d+)?])?", master
    )
    if dynamic:  # the number of instances is then only the first one
        executors = conf("spark.dynamicAllocation.maxExecutors")
    else:  # a standalone master gives an application as many executors as fit
        executors = None if master.startswith("spark://") else conf("spark.executor.instances")
    cores = conf("spark.executor.cores")
    if on_cluster and executors and cores:
        per_executor = int(cores) // cpus_per_task
        gpus = conf("spark.executor.resource.gpu.amount")
        if gpus and gpus_per_task:
            per_executor = min(per_executor, int(float(gpus) / gpus_per_task))
        max_total = int(executors) * per_executor
    return SlotCounts(
        total=None if on_cluster else max_total,
        max_total=max_total,
        dynamic_allocation=dynamic,
        master=master,
        gpus_per_task=gpus_per_task,
        autoscaling=_autoscaling(conf),
    )


def _autoscaling(conf: Callable[[str], str | None]) -> str:
    """The autoscaling of a Databricks cluster, from its tags."""
    tags = "spark.databricks.clusterUsageTags."
    if conf(f"{tags}clusterScalingType") != "autoscaling":
        return ""
    bounds = [conf(f"{tags}{name}") for name in ("clusterMinWorkers", "clusterMaxWorkers")]
    return f"{bounds[0]} to {bounds[1]} nodes" if all(bounds) else "autoscaling is on"
