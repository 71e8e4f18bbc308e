"""Workers on Ray: actors that form a world.

>>> from hvd_cluster.ray import RayExecutor
>>> with RayExecutor(RayExecutor.create_settings(), num_workers=4, use_gpu=True) as executor:
...     results = executor.run(train)

:class:`ElasticRayExecutor`, or ``RayExecutor(min_workers=...)``, continues when nodes die and uses nodes that join.
:mod:`hvd_cluster.ray.train` runs the same functions inside Ray Train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_cluster.lazy import lazy

if TYPE_CHECKING:
    from hvd_cluster.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from hvd_cluster.ray.executor import RayExecutor as RayExecutor
    from hvd_cluster.ray.function import run as run
    from hvd_cluster.ray.session import runtime_env as runtime_env
    from hvd_cluster.ray.worker import BaseHorovodWorker as BaseHorovodWorker

#: Public name -> the module that defines it. Loaded on first use.
_HOMES = {
    "BaseHorovodWorker": "worker",
    "ElasticRayExecutor": "elastic",
    "RayExecutor": "executor",
    "run": "function",
    "runtime_env": "session",
}

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "run", "runtime_env"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
