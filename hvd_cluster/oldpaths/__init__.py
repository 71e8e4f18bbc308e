"""Horovod's module paths, served by hvd_cluster.

The table maps each old path to a new one; the finder serves it below a root: ``hvd_cluster`` itself (always, so that
``hvd_cluster.spark.torch`` resolves) and ``horovod`` (after ``import hvd_cluster.compat``).

This package is not inside ``compat``, because importing ``compat`` makes ``horovod`` resolve here, and launchers and
``hvd_cluster`` itself need the table without that. It imports nothing else of ours until an old path is imported.
"""
