"""How busy this host is: its cores, memory and GPUs.

Needs psutil, and nvidia-ml-py for GPUs (extra ``monitor``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeUsage:
    """Percentages, 0 to 100."""

    #: Of all cores, since the last measurement; None without psutil.
    cpu_percent: float | None = None
    memory_percent: float | None = None
    #: For each GPU of the host, how much of the time it was busy, and how much of its memory is in use.
    gpu_percent: tuple[float, ...] = ()
    gpu_memory_percent: tuple[float, ...] = ()

    def metrics(self) -> dict[str, float]:
        """By name, as MLflow and OpenMetrics show them."""
        found = {"cpu_percent": self.cpu_percent, "memory_percent": self.memory_percent}
        values = {name: value for name, value in found.items() if value is not None}
        for index, (busy, used) in enumerate(zip(self.gpu_percent, self.gpu_memory_percent, strict=True)):
            values |= {f"gpu{index}_percent": busy, f"gpu{index}_memory_percent": used}
        return {name: value for name, value in values.items() if not math.isnan(value)}


class NodeMeter:
    """Measures this host."""

    def __init__(self) -> None:
        self._psutil: Any = None
        self._nvml: Any = None
        self._gpus: list[Any] = []
        self._cpu_times = (0.0, 0.0)
        with _or_not("cores and memory"):
            import psutil

            self._cpu_times = _cpu_times(psutil)
            self._psutil = psutil
        with _or_not("GPUs"):
            import pynvml

            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml

    def measure(self) -> NodeUsage:
        """The usage since the last call."""
        busy = [math.nan] * len(self._gpus)
        used = list(busy)
        for index, gpu in enumerate(self._gpus):
            with _or_not(f"GPU {index}"):
                busy[index] = float(self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
                memory = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
                used[index] = 100.0 * memory.used / memory.total
        cpu_percent = memory_percent = None
        if self._psutil is not None:
            with _or_not("cores and memory"):
                before, self._cpu_times = self._cpu_times, _cpu_times(self._psutil)
                busy_s, all_s = (now - then for now, then in zip(self._cpu_times, before, strict=True))
                # A difference of floats, or a counter that the kernel sets back, may lie outside.
                cpu_percent = min(max(100.0 * busy_s / all_s, 0.0), 100.0) if all_s > 0 else None
                memory_percent = self._psutil.virtual_memory().percent
        return NodeUsage(cpu_percent, memory_percent, tuple(busy), tuple(used))


def _cpu_times(psutil: Any) -> tuple[float, float]:
    """Seconds that all cores of this host were busy, and all their seconds.

    ``psutil.cpu_percent()`` would measure from its last call in the same thread, which other code may have made.
    """
    times = psutil.cpu_times()._asdict()
    all_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return all_s - times["idle"] - times.get("iowait", 0.0), all_s


@contextmanager
def _or_not(what: str) -> Iterator[None]:
    """The block measures ``what``, or does not."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a job must not end because a library cannot measure its host
        logger.debug("%s are not measured: %s", what, error)
