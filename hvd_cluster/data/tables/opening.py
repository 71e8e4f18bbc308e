"""Paths, URLs and the table objects of other libraries -> the table to read."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_cluster.data import spark_jobs
from hvd_cluster.data.files.filesystems import as_filesystem, is_local, normalize
from hvd_cluster.data.reading.parquet_files import files_of, format_at
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables import object_store, spark_catalog
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.data.tables.table_source import TableSource
from hvd_cluster.errors import DataError

#: (package, class) of the tables of other libraries that can be read -> its format.
_CLASSES = {
    ("deltalake", "DeltaTable"): "Delta",
    ("pyiceberg", "Table"): "Iceberg",
    ("lance", "LanceDataset"): "Lance",
    ("pyarrow", "Dataset"): "Arrow",
}
#: Formats of tables in folders that can be read.
_READ = ("Delta", "Iceberg", "Lance")


def is_table(data: Any) -> bool:
    """Whether this is a table, or the object of a library for one."""
    return isinstance(data, TableSource) or _format_of(data) is not None


def is_table_at(
    path: str | os.PathLike[str], filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Whether a path or URL holds a readable table of a format other than Parquet."""
    try:
        place, paths, _ = _open_paths(path, filesystem, storage_options)
        return _format_at(as_filesystem(place), paths[0]) in _READ
    except (OSError, DataError):  # the caller says what is wrong with it
        return False


def open_table(
    source: Any,
    *,
    version: int | str | None = None,
    as_of: dt.datetime | str | None = None,
    filesystem: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TableSource:
    """The live rows of a table: of one snapshot, which later commits do not change.

    Estimators, :class:`ParquetReader` and :func:`materialize` take what it returns, and open a path by themselves
    where that does. In a job of several workers, each of which makes a reader of its own, call it once in the driver
    and pass the result to the workers, so that all read one snapshot.

    Args:
        source: path or URL of a Delta, Iceberg or Lance table or of Parquet (a list of paths is Parquet); or a
            ``deltalake.DeltaTable``, ``pyiceberg.table.Table``, ``lance.LanceDataset`` or ``pyarrow.dataset.Dataset``;
            or, in a process with a Spark session, the name ("catalog.schema.table") of a Delta or Parquet table of
            Spark's own catalog.
        version: version of a Delta or Lance table, or id of a snapshot of an Iceberg table; as text also a tag (Lance,
            Iceberg) or a branch (Iceberg), even one of digits, or what messages call a version, such as "7@schema1".
            Default is the newest, and for an object what it has loaded.
        as_of: a time, as a ``datetime`` or in ISO 8601 (UTC where it names no zone): the state of the table then.
        filesystem: a pyarrow or fsspec filesystem in which ``source`` is a path, or a ``Store``; None uses the URL.
        storage_options: credentials and the like: options of the format's library (``aws_access_key_id`` of deltalake
            and lance, ``s3.access-key-id`` of pyiceberg), or arguments for the fsspec filesystem of the URL. None are
            those of a ``Store`` that is given as ``filesystem``.

    Raises:
        DataError: nothing can be read there, or the table has a feature that is not supported, which is named.
        MissingExtraError: the format's library is not installed.
    """
    if version is not None and as_of is not None:
        raise DataError(f"version is {version!r} and as_of {as_of!r}: give one of them")
    if isinstance(source, TableSource):
        table = source
        if version is not None or as_of is not None:
            raise DataError(f"{source.name} is opened already: give version or as_of where it is opened first")
        return table
    moment = None if as_of is None else _moment(as_of)
    library = _format_of(source)
    if library is not None:
        return _of_object(library, source, version, moment)
    if filesystem is None and spark_jobs.is_table_name(source):
        return spark_catalog.opened(source, version, moment)
    place, paths, url = _open_paths(source, filesystem, storage_options)
    if storage_options is None and isinstance(filesystem, Store) and object_store.is_in_one(url):
        storage_options = filesystem.storage_options  # the format's library opens the URL by itself
    is_one = isinstance(source, (str, os.PathLike))
    opened = as_filesystem(place)
    found = _format_at(opened, paths[0]) if is_one else None
    if found in _READ:
        by_url = isinstance(place, Store) or object_store.is_of_a_format(url, storage_options)
        if not by_url and not is_local(opened):
            raise DataError(
                f"the {found} table in {paths[0]!r} is opened by its URL: leave filesystem out, or give a Store"
            )
        return _of_folder(found, url, place, paths[0], version, moment, storage_options)
    name = repr(source if is_one else paths[0])
    if version is not None or as_of is not None:
        raise DataError(f"version and as_of are for Delta, Iceberg and Lance tables: {name} is not one")
    return ParquetFolder(place, files_of(opened, paths, listed=not is_one), name=name)


def require_one_version(table: TableSource, source: Any, num_readers: int, who: str) -> None:
    """Refuse a path that several processes open.

    Each would read the newest version at its own time.

    Args:
        table: what was opened.
        source: what the user gave for it.
        num_readers: how many open it.
        who: names them in the message, e.g. "ranks".
    """
    if table.snapshot is not None and num_readers > 1 and isinstance(source, (str, os.PathLike)):
        raise DataError(
            f"each of the {num_readers} {who} would read the newest version of the {table.snapshot.format} table "
            f"{table.snapshot.table!r} at its own time, and another process may write in between: call "
            f"hvd_cluster.data.open_table(path) once in the driver and pass the result to all {who}, or give "
            "open_table(path, version=...)"
        )


def _of_object(library: str, source: Any, version: int | str | None, moment: dt.datetime | None) -> TableSource:
    if library == "Delta":
        from hvd_cluster.data.tables import delta

        return delta.of_object(source, version, moment)
    if library == "Iceberg":
        from hvd_cluster.data.tables import iceberg

        return iceberg.of_object(source, version, moment)
    if library == "Lance":
        from hvd_cluster.data.tables import lance

        return lance.of_object(source, version, moment)
    from hvd_cluster.data.tables import arrow_dataset

    if version is not None or moment is not None:
        raise DataError("version and as_of are for Delta, Iceberg and Lance tables, not for pyarrow's data sets")
    return arrow_dataset.ArrowDataset(source)


def _of_folder(
    found: str,
    url: str,
    place: Any,
    path: str,
    version: int | str | None,
    moment: dt.datetime | None,
    storage_options: Mapping[str, Any] | None,
) -> TableSource:
    if found == "Iceberg":
        from hvd_cluster.data.tables import iceberg

        return iceberg.at(url, version, moment, storage_options)
    if found == "Lance":
        from hvd_cluster.data.tables import lance

        return lance.at(url, version, moment, storage_options)
    from hvd_cluster.data.tables import delta

    return delta.at(url, place, path, version, moment, storage_options)


def _format_at(filesystem: Any, path: str) -> str | None:
    return "Iceberg" if path.endswith(".metadata.json") else format_at(filesystem, path)


def _format_of(source: Any) -> str | None:
    for cls in type(source).__mro__:
        found = _CLASSES.get((cls.__module__.partition(".")[0], cls.__name__))
        if found is not None:
            return found
    return None


def _moment(as_of: dt.datetime | str) -> dt.datetime:
    try:
        moment = as_of if isinstance(as_of, dt.datetime) else dt.datetime.fromisoformat(as_of)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"as_of is {as_of!r}: give a datetime, or a time as text such as '2026-05-01T12:00:00+00:00'"
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.timezone.utc)


def _open_paths(source: Any, filesystem: Any, storage_options: Mapping[str, Any] | None) -> tuple[Any, list[str], str]:
    """The Store or filesystem of paths, the paths in it, and the first path or URL."""
    several = [source] if isinstance(source, (str, os.PathLike)) else list(source) if _is_list(source) else []
    if not several or not all(isinstance(path, (str, os.PathLike)) for path in several):
        # The type, and not all rows of a DataFrame.
        shown = repr(source) if _is_list(source) and not several else f"data of type {type(source).__name__}"
        raise DataError(f"cannot read {shown}: give a path or URL of Parquet data, a list of such, or a Dataset")
    if (
        filesystem is None
        and len(several) == 1
        and object_store.is_of_a_format(url := normalize(several[0]), storage_options)
    ):
        place, path = object_store.place_of(url, storage_options)
        return place, [path], url
    if filesystem is None:
        store = Store.create(several[0], storage_options=storage_options)
        return store, [store.get_localized_path(normalize(path)) for path in several], store.prefix
    if isinstance(filesystem, Store):
        paths = [normalize(path) for path in several]
        return filesystem, [filesystem.get_localized_path(path) for path in paths], paths[0]
    paths = [os.fspath(path).rstrip("/") for path in several]
    return as_filesystem(filesystem), paths, paths[0]


def _is_list(source: Any) -> bool:
    return isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray))
