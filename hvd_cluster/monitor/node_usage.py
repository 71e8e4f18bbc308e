"""How busy this host is: its cores, memory and GPUs. Needs psutil, and nvidia-ml-py for GPUs (extra ``monitor``)."""

from __future__ import annotations

import logging
from contextlib import suppress
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
        return values


class NodeMeter:
    """Measures this host."""

    def __init__(self) -> None:
        self._psutil: Any = None
        self._nvml: Any = None
        self._gpus: list[Any] = []
        with suppress(ImportError):
            import psutil

            self._psutil = psutil
            psutil.cpu_percent()  # the first call only begins to measure
        with suppress(ImportError):
            import pynvml

            try:
                pynvml.nvmlInit()
                self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
                self._nvml = pynvml
            except pynvml.NVMLError as error:
                logger.debug("GPUs are not measured: %s", error)

    def measure(self) -> NodeUsage:
        """The usage since the last call."""
        busy: list[float] = []
        used: list[float] = []
        for gpu in self._gpus:
            with suppress(self._nvml.NVMLError):
                rates, memory = self._nvml.nvmlDeviceGetUtilizationRates(gpu), self._nvml.nvmlDeviceGetMemoryInfo(gpu)
                busy.append(float(rates.gpu))
                used.append(100.0 * memory.used / memory.total)
        if self._psutil is None:
            return NodeUsage(None, None, tuple(busy), tuple(used))
        return NodeUsage(self._psutil.cpu_percent(), self._psutil.virtual_memory().percent, tuple(busy), tuple(used))
