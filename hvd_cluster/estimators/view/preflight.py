"""The line that a fit shows before its workers start."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.estimators.backend import Backend
from hvd_cluster.launch.call import pack

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


def line(backend: Backend, spec: FitSpec, rows: Any = None) -> str:
    """Workers, rows and versions of a fit, in one line.

    Args:
        backend: what runs the workers.
        spec: the run.
        rows: rows that reach the workers without a store, if any; only the workers count those.
    """
    data = spec.dataset
    counted = f"{data.train.rows:,} rows to train on"
    if data.validation is not None:
        counted += f" and {data.validation.rows:,} to validate on"
    parts = [
        f"{backend.num_processes()} workers ({backend.where()})",
        counted if rows is None else "rows go straight to the workers",
        f"Python {platform.python_version()}, torch {torch.__version__}",
        f"{len(pack(_nothing, kwargs={'spec': spec})) / 1000:,.0f} kB for each worker",
    ]
    return f"{spec.run_id}: " + "; ".join(parts)


def _nothing(spec: Any) -> None: ...
