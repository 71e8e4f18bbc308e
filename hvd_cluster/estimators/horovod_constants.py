"""Constants that programs import from ``horovod.spark``."""

from __future__ import annotations

#: How the intermediate data hold a column: as an array, as a sparse vector's parts, or unchanged.
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"

BYTES_PER_GIB = 2**30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
METRIC_PRINT_FREQUENCY = 1000
#: Accepted where petastorm's readers take it; pyarrow reads here.
PETASTORM_HDFS_DRIVER = "libhdfs"

#: The oldest Lightning that Horovod's estimator takes; programs compare theirs with it.
MIN_PL_VERSION = "1.3.8"
