"""Data: stores, schemas, DataFrame to Parquet, and the reader that yields batches of tensors.

Import from the modules (``hvd_cluster.data.store``, ``.materialize``, ``.reader``, ...): this page imports nothing,
because pyarrow, pandas and pyspark may be absent.
"""
