"""Workers on Spark: ``hvd_cluster.spark.run(fn)``, classic and Connect."""

from __future__ import annotations

from hvd_cluster.spark.elastic.function import run_elastic
from hvd_cluster.spark.function import run
from hvd_cluster.spark.horovod_runner import HorovodRunner

__all__ = ["HorovodRunner", "run", "run_elastic"]
