"""Runs the workers of a tf.data service as tasks of a Spark job.

``spark-submit --master yarn --num-executors 4 .../hvd_cluster/spark/compute_worker.py service.json``, or ``python -m
hvd_cluster.spark.compute_worker service.json`` if the environment or its defaults configure the cluster for pyspark.
The arguments are those of ``hvd_cluster.tensorflow.data.compute_worker``. The first worker writes the file on its own
host: choose a path that the training job can read too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Run as many workers as the session runs tasks at once.

    They run until the training job ends the service.

    Raises:
        WorkerFailedError: a worker failed; with a ValueError if the workers cannot be divided equally among
            dispatchers.
        NotEnoughSlotsError: the session runs no tasks.
    """
    from pyspark.sql import SparkSession

    from hvd_cluster.spark import run
    from hvd_cluster.tensorflow.data.compute_worker import parsed

    parsed(arguments)  # reports invalid arguments here, and not in each task
    active = SparkSession.getActiveSession()
    spark = active or SparkSession.builder.appName("hvd tf.data service").getOrCreate()
    try:
        run(_serve, (list(arguments),), spark=spark)
    finally:
        if active is None:
            spark.stop()


def _serve(arguments: Sequence[str]) -> None:
    from hvd_cluster.tensorflow.data.compute_worker import main as serve

    serve(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
