"""Horovod's module paths, answered by hvd_cluster.

The table says where each old path lives now; the finder serves it below a root: ``hvd_cluster`` itself (always, so that
``hvd_cluster.spark.torch`` resolves) and ``horovod`` (after ``import hvd_cluster.compat``).

This package stands beside ``compat`` and not inside it: importing ``compat`` is the user's word that ``horovod`` is to
resolve here, and launchers and ``hvd_cluster`` itself need the table without giving that word. It imports nothing else
of ours until an old path is asked for.
"""
