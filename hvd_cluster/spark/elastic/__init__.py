"""Elastic jobs on Spark: workers come and go with the tasks that carry them.

Start reading at :func:`hvd_cluster.spark.elastic.function.run_elastic`. The *task_pool* keeps Spark jobs of one task
each running; a *carrier* is what such a task does: it calls the driver and serves as a host of one slot. The *fleet*
starts workers on those hosts for the driver of :mod:`hvd_cluster.launch.elastic`, and *failures* decides when a job
whose tasks keep failing is given up.
"""
