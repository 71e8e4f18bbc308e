"""What a fit says before its workers start: one line, from which one can tell what will happen."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.estimators.backend import Backend
from hvd_cluster.launch.call import pack

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


def line(backend: Backend, spec: FitSpec, rows: Any = None) -> str:
    """The line.

    Args:
        backend: what runs the workers.
        spec: the run.
        rows: rows that travel with the workers, if they do: then only the workers learn how many there are.
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
