"""Spark's table names -> files if directly readable, else what Spark reads."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any

from hvd_cluster.data import spark_jobs
from hvd_cluster.data.files.filesystems import as_filesystem
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.parquet_files import files_of
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.data.tables.table_source import TableSource
from hvd_cluster.errors import DataError, MissingExtraError

logger = logging.getLogger(__name__)

#: Catalogs that do not filter rows or mask columns: a table of another one is read by Spark.
_PLAIN_CATALOGS = {"spark_catalog", "hive_metastore"}
_NUMBERS = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean"}


def resolved(name: str) -> Any:
    """What a fit reads for a table's name: one Delta version, or a DataFrame.

    Raises:
        DataError: this process has no Spark session, or the session no such table.
    """
    frame = _frame(name)
    facts = _facts(name, frame)
    if facts.get("Provider", "").lower() == "delta":
        try:
            return opened(name)
        except (DataError, MissingExtraError) as error:
            logger.info("Spark reads %s: %s", name, error)
    return frame


def opened(name: str, version: int | str | None = None, moment: dt.datetime | None = None) -> TableSource:
    """The files of a Delta or Parquet table of Spark's own catalog.

    Args:
        name: the table.
        version: of a Delta table; None for the newest.
        moment: the version at this time.

    Raises:
        DataError: there is no such table, or only Spark can read it.
    """
    frame = _frame(name)
    facts = _facts(name, frame)
    kind, provider = facts.get("Type"), facts.get("Provider", "").lower()
    if kind not in {"MANAGED", "EXTERNAL"} or facts.get("Catalog") not in _PLAIN_CATALOGS:
        raise _unopened(name, "it is a view, or in a catalog that may filter its rows")
    if provider == "delta":
        from hvd_cluster.data.tables import delta

        store = Store.create(facts["Location"])
        path = store.get_localized_path(store.prefix)
        return delta.at(store.prefix, store, path, version, moment, None)
    if provider != "parquet":
        raise _unopened(name, f"it is stored as {provider or 'nothing that Spark names'}")
    if version is not None or moment is not None:
        raise DataError(f"version and as_of are for Delta, Iceberg and Lance tables: {name!r} is not one")
    return _parquet(name, frame)


def _parquet(name: str, frame: Any) -> ParquetFolder:
    """The files that Spark would read.

    It does not read all files in the folder, and partitions may lie elsewhere.
    """
    urls = sorted(frame.inputFiles())
    if not urls:
        raise DataError(f"the table {name!r} has no rows")
    store = Store.create(urls[0])
    paths = [store.get_localized_path(url) for url in urls]
    types = {field.name: field.dataType.simpleString().replace("_ntz", "") for field in frame.schema.fields}
    texts = {column for column, kind in types.items() if kind == "string"}
    try:
        files = files_of(as_filesystem(store), paths, listed=True)
        table = ParquetFolder(store, files, texts=texts, name=f"the table {name!r}")
    except DataError as error:
        raise _unopened(name, str(error)) from error
    found = {field.name: _spark_type(field.type) for field in table.arrow_schema}
    has_defaults = any("EXISTS_DEFAULT" in (field.metadata or {}) for field in frame.schema.fields)
    if found != types or has_defaults:
        raise _unopened(name, f"its columns are {types}, some with defaults, and those of its files {found}")
    return table


def _spark_type(arrow_type: Any) -> str:
    """What Spark calls the type of a column."""
    types, text = load_pyarrow("pyarrow.types"), str(arrow_type)
    if types.is_timestamp(arrow_type):  # both of Spark's are the same number here, and INT96 has no time zone
        return "timestamp"
    if types.is_decimal(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if types.is_list(arrow_type):
        return f"array<{_spark_type(arrow_type.value_type)}>"
    if types.is_map(arrow_type):
        return f"map<{_spark_type(arrow_type.key_type)},{_spark_type(arrow_type.item_type)}>"
    if types.is_struct(arrow_type):
        return f"struct<{','.join(f'{field.name}:{_spark_type(field.type)}' for field in arrow_type)}>"
    return "date" if types.is_date32(arrow_type) else _NUMBERS.get(text, text)


def _frame(name: str) -> Any:
    frame = spark_jobs.table_named(name)
    if frame is None:
        raise DataError(
            f"there is no Parquet at {name!r}: there is no such file or folder. If it is the name of a table, call "
            "hvd_cluster.data.open_table(name) in the driver, whose Spark session must know it, and pass the result to "
            "the workers; or give the table's path"
        )
    return frame


def _facts(name: str, frame: Any) -> dict[str, str]:
    """What Spark's catalog says about a table, such as its "Provider" and "Location"."""
    described = frame.sparkSession.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    rows = [(row["col_name"], row["data_type"]) for row in described]
    begin = next((number for number, (key, _) in enumerate(rows) if key.startswith("# Detailed")), len(rows))
    return dict(rows[begin + 1 :])


def _unopened(name: str, why: str) -> DataError:
    return DataError(
        f"only Spark can read the table {name!r}: {why}. Call materialize({name!r}, store, columns=...) in the driver, "
        "and give the reader what that returns; of an earlier version, give materialize() or fit() the DataFrame "
        f"spark.read.option('versionAsOf', ...).table({name!r})"
    )
