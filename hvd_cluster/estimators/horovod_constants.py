"""Constants that programs import from ``horovod.spark``."""

from __future__ import annotations

#: Storage formats of a column in the intermediate data: an array, the parts of a sparse vector, or unchanged.
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"

BYTES_PER_GIB = 2**30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
METRIC_PRINT_FREQUENCY = 1000
#: Accepted for petastorm's readers, and without effect: pyarrow reads HDFS.
PETASTORM_HDFS_DRIVER = "libhdfs"

#: The oldest Lightning that Horovod's estimator supports.
MIN_PL_VERSION = "1.3.8"
