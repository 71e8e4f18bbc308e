"""The log file of autotune: Horovod's columns, and the best parameters last."""

from __future__ import annotations

import logging
from pathlib import Path

from hvd_cluster.engine.autotune.observation import Parameters

logger = logging.getLogger(__name__)

#: Here the first three are not tuned, and the cache is always used.
_COLUMNS = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,"
    "cycle_time_ms,tensor_fusion_threshold,score"
)


class AutotuneLog:
    """``HOROVOD_AUTOTUNE_LOG``. Each line is written as soon as it is known.

    Args:
        path: the file; an existing one is replaced. Empty for none.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._append(_COLUMNS, "w")

    def write(self, parameters: Parameters, score: float) -> None:
        """Write parameters and their score, in bytes per microsecond."""
        self._append(f"0,0,0,1,{parameters.cycle_time_ms:g},{parameters.fusion_threshold_bytes},{score:.6g}", "a")

    def _append(self, line: str, mode: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open(mode, encoding="ascii") as file:
                file.write(line + "\n")
        except OSError as error:
            logger.warning("autotune cannot write its log: %s", error)
            self._path = None
