"""What programs import from ``horovod.runner``: small parts of its launcher, over ours.

:mod:`hvd_cluster.oldpaths.table` says at which of Horovod's paths each name is served.
"""
