"""What a fit logs: a line before workers start, a warning of a non-finite loss."""

from __future__ import annotations

import importlib
import logging
import math
import platform
from typing import TYPE_CHECKING, Any

from hvd_cluster.estimators.backend import Backend
from hvd_cluster.launch.call import pack

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec

logger = logging.getLogger(__name__)

_PARTS = {"train": "training", "validation": "validation"}


def preflight_line(backend: Backend, spec: FitSpec, rows: Any = None) -> str:
    """Workers, rows and versions of a fit, in one line.

    Args:
        backend: what runs the workers.
        spec: the run.
        rows: rows that reach the workers without a store, if any; only the workers count those.
    """
    data, num_proc = spec.dataset, backend.num_processes()
    counted = f"{data.train.rows:,} rows to train on"
    if data.validation is not None:
        counted += f" and {data.validation.rows:,} to validate on"
    if data.train.snapshot is not None:
        counted += f" of {data.train.snapshot}"
    parts = [
        f"{num_proc} worker{'s'[: num_proc - 1]} ({backend.where()})",
        counted if rows is None else "rows go straight to the workers",
        f"Python {platform.python_version()}, {', '.join(map(_with_version, spec.trained_with))}",
        f"{len(pack(_nothing, kwargs={'spec': spec})) / 1000:,.0f} kB for each worker",
    ]
    return f"{spec.run_id}: " + "; ".join(parts)


def _with_version(package: str) -> str:
    return f"{package.partition('.')[0]} {importlib.import_module(package).__version__}"


def _nothing(spec: Any) -> None: ...


class LossWatch:
    """A ``watch(record)`` that warns once, at the first epoch with a non-finite loss.

    Args:
        run_id: the name of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._has_warned = False

    def __call__(self, record: dict[str, Any]) -> None:
        losses = {name: record.get(part, {}).get("loss", 0.0) for part, name in _PARTS.items()}
        found = [f"the {name} loss is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        if found and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "run %r: in epoch %d %s. Look for NaN, infinite or very large numbers in the columns (a date or time "
                "is one large number), and try a lower learning rate",
                self._run_id,
                record["epoch"],
                " and ".join(found),
            )
