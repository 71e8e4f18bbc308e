"""Recognise data to fit or transform without importing its packages."""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.spark_jobs import is_table_name
from hvd_cluster.data.tables import spark_catalog
from hvd_cluster.data.tables.opening import is_table, is_table_at, open_table
from hvd_cluster.data.writing.assembly import NO_ROWS_TEXT
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    from hvd_cluster.data.store import Store


class Frame(enum.Enum):
    """Kinds of data."""

    SPARK = "a Spark DataFrame"
    PANDAS = "a pandas DataFrame"
    ARROW = "a pyarrow Table"
    PARQUET = "a path of Parquet or a table"
    RAY = "a Ray Dataset"


#: (package, class) -> its kind.
_CLASSES = {
    ("pyspark", "DataFrame"): Frame.SPARK,
    ("pandas", "DataFrame"): Frame.PANDAS,
    ("pyarrow", "Table"): Frame.ARROW,
    ("ray", "Dataset"): Frame.RAY,
}


def kind_of(data: Any) -> Frame:
    """The kind of ``data``.

    Raises:
        DataError: it is of another kind.
    """
    if isinstance(data, (str, os.PathLike)) or is_table(data):
        return Frame.PARQUET
    for cls in type(data).__mro__:
        kind = _CLASSES.get((cls.__module__.partition(".")[0], cls.__name__))
        # That of pandas-on-Spark has other methods.
        if kind is not None and not f"{cls.__module__}.".startswith("pyspark.pandas."):
            return kind
    wanted = ", ".join(kind.value for kind in Frame)
    raise DataError(f"data of type {type(data).__module__}.{type(data).__qualname__} is not supported: give {wanted}")


def column_names(data: Any) -> list[str]:
    """The names of all columns, in order. Reads no row.

    Raises:
        DataError: no Parquet can be read at the path, or a Ray Dataset has no rows.
    """
    kind = kind_of(data)
    if kind is Frame.ARROW:
        return list(data.column_names)
    if kind is Frame.RAY:
        names = data.columns()
        if names is None:  # Ray has seen no row of it
            raise DataError(NO_ROWS_TEXT)
        return [str(name) for name in names]
    if is_table(data):
        return list(open_table(data).arrow_schema.names)
    if kind is Frame.PARQUET:
        from hvd_cluster.data.store import Store

        store = Store.create(data)
        return parquet_columns(store, store.prefix, repr(os.fspath(data)))
    return [str(name) for name in data.columns]


def parquet_columns(store: Store, path: str, shown: str) -> list[str]:
    """The column names of Parquet in a store; ``shown`` is its place for messages.

    Raises:
        DataError: no Parquet can be read there.
    """
    try:
        return list(open_table(path, filesystem=store).arrow_schema.names)
    except (OSError, DataError) as error:
        raise DataError(f"no Parquet can be read at {shown}: {error}") from error


def pinned(data: Any) -> Any:
    """The data; shared tables at the newest snapshot or as Spark reads them."""
    if is_table_name(data):
        return spark_catalog.resolved(data)
    if is_table(data):
        return open_table(data)
    if isinstance(data, (str, os.PathLike)) and is_table_at(data):
        return open_table(data)
    return data
