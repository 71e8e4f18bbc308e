"""Workers on Ray: actors that form a world.

>>> from hvd_cluster.ray import RayExecutor
>>> with RayExecutor(RayExecutor.create_settings(), num_workers=4, use_gpu=True) as executor:
...     results = executor.run(train)

:class:`ElasticRayExecutor`, or ``RayExecutor(min_workers=...)``, goes on when nodes die and takes those that join.
:mod:`hvd_cluster.ray.train` runs the same functions inside Ray Train.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_cluster.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from hvd_cluster.ray.executor import RayExecutor as RayExecutor
    from hvd_cluster.ray.function import run as run
    from hvd_cluster.ray.worker import BaseHorovodWorker as BaseHorovodWorker

#: Public name -> the module that defines it. Loaded on first use.
_HOMES = {
    "BaseHorovodWorker": "worker",
    "ElasticRayExecutor": "elastic",
    "RayExecutor": "executor",
    "run": "function",
}

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
