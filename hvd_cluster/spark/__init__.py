"""Workers on Spark: ``hvd_cluster.spark.run(fn)`` on classic and on Connect sessions."""

from __future__ import annotations

from hvd_cluster.spark.elastic.function import run_elastic
from hvd_cluster.spark.function import run

__all__ = ["run", "run_elastic"]
