"""Data: stores, schemas, DataFrame to Parquet, and the reader of batches.

A batch is a dict of tensors.

>>> from hvd_cluster.data import ParquetReader, Store, materialize
>>> dataset = materialize(df, Store.create("/shared/work"), columns=["features", "label"])
>>> for batch in ParquetReader(dataset.train, batch_size=64):
...     train(batch["features"], batch["label"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_cluster.lazy import lazy

if TYPE_CHECKING:
    from hvd_cluster.data.materializing import materialize as materialize
    from hvd_cluster.data.reader import ParquetReader as ParquetReader
    from hvd_cluster.data.reader_config import ColumnConfig as ColumnConfig
    from hvd_cluster.data.reader_config import OrderConfig as OrderConfig
    from hvd_cluster.data.reader_config import PrefetchConfig as PrefetchConfig
    from hvd_cluster.data.store import Store as Store
    from hvd_cluster.data.tables.opening import open_table as open_table

#: Public name -> the module that defines it. Loaded on first use: pyarrow, pandas and pyspark may be absent.
_HOMES = {
    **dict.fromkeys(("ColumnConfig", "OrderConfig", "PrefetchConfig"), "reader_config"),
    "ParquetReader": "reader",
    "Store": "store",
    "materialize": "materializing",
    "open_table": "tables.opening",
}

__all__ = ["ColumnConfig", "OrderConfig", "ParquetReader", "PrefetchConfig", "Store", "materialize", "open_table"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
