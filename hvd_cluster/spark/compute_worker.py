"""The workers of a tf.data service as tasks of a Spark job.

``spark-submit --master yarn --num-executors 4 .../hvd_cluster/spark/compute_worker.py service.json``, or
``python -m hvd_cluster.spark.compute_worker service.json`` where the environment or its defaults tell pyspark of the
cluster. The arguments are those of ``hvd_cluster.tensorflow.data.compute_worker``. The first worker writes the file, on
its own host: name one that the training job sees too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Serve, in as many workers as the session runs tasks at once, until the training job ends the service.

    Raises:
        WorkerFailedError: a worker did; a ValueError where they cannot be dealt equally to the dispatchers.
        NotEnoughSlotsError: the session runs no tasks.
    """
    from pyspark.sql import SparkSession

    from hvd_cluster.spark import run
    from hvd_cluster.tensorflow.data.compute_worker import parsed

    parsed(arguments)  # what is wrong with them is told here, and not in each task
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
