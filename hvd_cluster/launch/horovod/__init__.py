"""What programs import from ``horovod.runner``.

Small parts of Horovod's launcher, implemented with ours. :mod:`hvd_cluster.oldpaths.table` maps Horovod's paths to
these names.
"""
