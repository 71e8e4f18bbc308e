"""Elastic jobs on Spark: workers come and go with the tasks that run them.

Start reading at :func:`hvd_cluster.spark.elastic.function.run_elastic`. The *task pool* keeps Spark jobs of one task
each running; an *agent task* connects to the driver and serves as a host with one slot. The *fleet* starts workers on
those hosts for the controller of :mod:`hvd_cluster.launch.elastic`, and *failures* decides when a job whose tasks keep
failing is given up.
"""
