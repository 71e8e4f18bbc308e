"""Delta tables, whose log deltalake reads.

The Parquet files of the version are read as any other. What a reader must know of a table is in the "Delta Transaction
Log Protocol" (PROTOCOL.md of delta-io/delta).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import zlib
from collections.abc import Collection, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.files.filesystems import as_filesystem
from hvd_cluster.data.filters import Statistics
from hvd_cluster.data.optional import load_extra, load_pyarrow
from hvd_cluster.data.tables import object_store
from hvd_cluster.data.tables.snapshot_files import UNKNOWN_ROWS, FieldNames, ListedFile, SnapshotFiles
from hvd_cluster.data.tables.table_source import EPOCH, Snapshot, epoch_ms
from hvd_cluster.errors import DataError

#: Reader features (protocol, "Valid Feature Names in Table Features") that are understood: those of the log are
#: deltalake's part, those of data files ours.
_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
_MAX_READER_VERSION = 3
#: Digits of a decimal number that survive as a floating-point number.
_EXACT_DIGITS = 15
_MAPPING_MODE = "delta.columnMapping.mode"
_PHYSICAL_NAME = "delta.columnMapping.physicalName"
_FIELD_ID = "delta.columnMapping.id"
_TYPE_CHANGES = "delta.typeChanges"


def at(
    url: str,
    place: Any,
    path: str,
    version: int | str | None,
    moment: dt.datetime | None,
    storage_options: Mapping[str, Any] | None,
) -> SnapshotFiles:
    """The table in a folder.

    Args:
        url: its path or URL.
        place: the Store or filesystem that serves it.
        path: the path inside that.
        version: None for the newest.
        moment: the version at this time.
        storage_options: arguments for fsspec's filesystem.
    """
    options = object_store.options_of(url, storage_options)
    opened = _opened(url, version, moment, options)
    _require_not_later(opened, place, path, moment)
    return _source(opened, place, path)


def of_object(table: Any, version: int | str | None, moment: dt.datetime | None) -> SnapshotFiles:
    """What a ``deltalake.DeltaTable`` has loaded, or another version of it."""
    url, options = table.table_uri, table._storage_options
    opened = _opened(url, table.version() if version is None and moment is None else version, moment, options)
    # The library percent-encodes the path. Of a local one, that is undone where any local URL is.
    is_local = (urlsplit(url).scheme or "file") == "file"
    place, path = object_store.place_of((url if is_local else unquote(url)).rstrip("/"), options)
    _require_not_later(opened, place, path, moment)
    return _source(opened, place, path)


def are_live(folder: str, paths: Collection[str]) -> bool:
    """Whether all rows of local files, by column name, are of one table version.

    If they are, then of the newest one, or of the one that added the last of them.

    Args:
        folder: the table's folder.
        paths: the files, as paths that begin with it.
    """
    if _all_live(table := _opened(folder, None, None, None), folder, paths):
        return True
    commits = [file for file in Path(folder, "_delta_log").glob("*.json") if file.stem.isdecimal()]
    for commit in sorted(commits, reverse=True):
        adds = [json.loads(line).get("add") for line in commit.read_text().splitlines() if '"add"' in line]
        if any(add and _inside(add["path"], folder, table.table_uri) in paths for add in adds):
            return _all_live(_opened(folder, int(commit.stem), None, None), folder, paths)
    return False


def _all_live(table: Any, folder: str, paths: Collection[str]) -> bool:
    configuration, features = table.metadata().configuration, set(table.protocol().reader_features or ())
    if configuration.get(_MAPPING_MODE, "none") != "none" or features - _FEATURES:
        return False
    given = load_pyarrow().table(table.get_add_actions(flatten=False)).column("path").to_pylist()
    deleted = _deleted(table)
    return set(paths) <= {
        _inside(one, folder, table.table_uri) for one in given if _url(one, table.table_uri) not in deleted
    }


def _opened(url: str, version: int | str | None, moment: dt.datetime | None, options: Any) -> Any:
    """The ``deltalake.DeltaTable`` of a version."""
    deltalake = load_extra("deltalake", "delta", "to read Delta tables")
    if isinstance(version, str) and not version.isdecimal():
        raise DataError(f"version is {version!r}: the versions of a Delta table are whole numbers")
    try:
        table = deltalake.DeltaTable(url, version=None if version is None else int(version), storage_options=options)
        if moment is not None:
            table.load_as_version(moment)
    except Exception as error:  # deltalake has several kinds without a common base, and object_store's
        which = "" if version is None and moment is None else f" as of {moment or f'version {version}'}"
        raise DataError(f"cannot open the Delta table in {url!r}{which}: {error}") from error
    return table


def _require_not_later(table: Any, place: Any, path: str, moment: dt.datetime | None) -> None:
    """Refuse a version that deltalake loaded for a time before any in the log.

    Args:
        table: the ``deltalake.DeltaTable``.
        place: the Store or filesystem that serves it.
        path: its folder inside that.
        moment: None where the version was not chosen by time.
    """
    if moment is None:
        return
    commit = f"{path.rstrip('/')}/_delta_log/{table.version():020}.json"
    # By this time deltalake chooses, in milliseconds; fsspec's filesystems may not say it.
    time_ns = as_filesystem(place).get_file_info(commit).mtime_ns
    committed_ms = table.history(1)[0].get("timestamp") if time_ns is None else time_ns // 1_000_000
    if committed_ms is not None and committed_ms > epoch_ms(moment):
        raise DataError(
            f"the Delta table {table.table_uri!r} has no version as of {moment}: version {table.version()}, the "
            f"oldest in its log, is of {EPOCH + dt.timedelta(milliseconds=committed_ms)}"
        )


def _source(table: Any, place: Any, path: str) -> SnapshotFiles:
    pyarrow = load_pyarrow()
    snapshot = Snapshot(
        format="Delta", table=table.table_uri, version=str(table.version()), table_id=str(table.metadata().id)
    )
    _require_features(table, snapshot)
    fields = json.loads(table.schema().to_json())["fields"]
    mode = table.metadata().configuration.get(_MAPPING_MODE, "none")
    if mode not in {"none", "name", "id"}:
        raise DataError(f"{snapshot} has {_MAPPING_MODE}={mode!r}, which is not known")
    physical = {
        one["name"]: one["metadata"].get(_PHYSICAL_NAME, one["name"]) if mode != "none" else one["name"]
        for one in fields
    }
    names = FieldNames(
        names={} if mode == "id" else {name: (stored,) for name, stored in physical.items()},
        ids={one["name"]: int(one["metadata"][_FIELD_ID]) for one in fields} if mode == "id" else None,
    )
    refused = {
        one["name"]: f"its fields have other names in the files ({_MAPPING_MODE}={mode!r}), which is not supported"
        for one in fields
        if mode != "none" and _is_mapped_inside(one["type"], by_id=mode == "id")
    }
    files, listed = _files(table, path, physical, {one["name"] for one in fields if _was_float(one)})
    # Copies of a table have one id, and each of them counts its versions on.
    content = json.dumps([fields, listed], sort_keys=True)
    snapshot = dataclasses.replace(snapshot, table_id=f"{snapshot.table_id} files {zlib.crc32(content.encode()):08x}")
    return SnapshotFiles(place, pyarrow.schema(table.schema().to_arrow()), snapshot, files, names, refused)


def _require_features(table: Any, snapshot: Snapshot) -> None:
    """Refuse what a reader has to know and we do not, by name."""
    protocol = table.protocol()
    if protocol.min_reader_version > _MAX_READER_VERSION:
        raise DataError(
            f"{snapshot} needs readers of version {protocol.min_reader_version}, and this is one of version "
            f"{_MAX_READER_VERSION}"
        )
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if unknown:
        raise DataError(
            f"{snapshot} has features that are not supported: {', '.join(unknown)}. Read it with Spark, and give the "
            "DataFrame to fit() or materialize()"
        )


def _is_mapped_inside(delta_type: Any, *, by_id: bool) -> bool:
    """Whether a type has fields in it that files may call by other names."""
    if not isinstance(delta_type, dict):
        return False
    if delta_type["type"] == "struct":
        return any(
            by_id
            or one["metadata"].get(_PHYSICAL_NAME, one["name"]) != one["name"]
            or _is_mapped_inside(one["type"], by_id=by_id)
            for one in delta_type["fields"]
        )
    inner = (delta_type.get(key) for key in ("elementType", "keyType", "valueType"))
    return any(_is_mapped_inside(one, by_id=by_id) for one in inner)


def _was_float(field: Mapping[str, Any]) -> bool:
    """Whether a column was widened from float, whose shortest text the log has.

    A text such as 0.1 is not equal to the value in the row.
    """
    return any(change["fromType"] == "float" for change in field["metadata"].get(_TYPE_CHANGES, ()))


def _files(
    table: Any, path: str, physical: Mapping[str, str], unbounded: Collection[str]
) -> tuple[list[ListedFile], list[list[Any]]]:
    """The files of the version, in the order in which they were written.

    Args:
        table: the ``deltalake.DeltaTable``.
        path: its folder inside the filesystem.
        physical: column -> its name in files.
        unbounded: columns whose bounds in the log are not those of the rows.

    Returns:
        The files, and for each of them what identifies its rows: path, size, and a checksum of the deleted ones.
    """
    pyarrow = load_pyarrow()
    deleted = _deleted(table)
    found, listed = [], []
    actions = pyarrow.table(table.get_add_actions(flatten=False)).sort_by(
        [("modification_time", "ascending"), ("path", "ascending")]
    )
    for action in actions.to_pylist():
        given = action["path"]
        rows = deleted.pop(_url(given, table.table_uri), None)
        listed.append([given, action["size_bytes"], None if rows is None else zlib.crc32(rows.tobytes())])
        found.append(
            ListedFile(
                path=_inside(given, path, table.table_uri),
                rows=_rows(action),
                constants={key: _constant(value) for key, value in (action.get("partition") or {}).items()},
                statistics=_statistics(action, physical, unbounded, is_exact=rows is None),
                deleted=rows,
            )
        )
    if deleted:
        raise DataError(f"deletion vectors of {table.table_uri} belong to no file of it: {sorted(deleted)[:3]}")
    return found, listed


def _constant(value: Any) -> Any:
    """A partition value; deltalake writes bytes as "\\u00FF" of each, which is undone."""
    if isinstance(value, bytes) and re.fullmatch(rb"(\\u00[0-9A-Fa-f]{2})+", value):
        return bytes.fromhex(value.decode().replace("\\u00", ""))
    return value


def _inside(path: str, folder: str, url: str) -> str:
    """The path, inside the filesystem, of a file that the log names.

    The log names it by a path relative to the table's folder or by a URL. Shallow clones name files of the table that
    they were made of.
    """
    if not _is_absolute(path):
        return f"{folder.rstrip('/')}/{unquote(path)}"
    own, other = urlsplit(url), urlsplit(path)
    if (own.scheme or "file", own.netloc) != (other.scheme or "file", other.netloc):
        raise DataError(f"the Delta table {url!r} names a file in another place, which is not supported: {path}")
    inner = unquote(other.path)
    return inner if (own.scheme or "file") == "file" else f"{other.netloc}{inner}"


def _url(path: str, url: str) -> str:
    """The URL of a file that the log names, without its encoding."""
    return unquote(path if _is_absolute(path) else f"{url.rstrip('/')}/{path}")


def _is_absolute(path: str) -> bool:
    return "://" in path or path.startswith(("/", "file:"))


def _rows(action: Mapping[str, Any]) -> int:
    return UNKNOWN_ROWS if action["num_records"] is None else int(action["num_records"])


def _deleted(table: Any) -> dict[str, npt.NDArray[np.int64]]:
    """Decoded URL of a file -> the numbers of its rows that deletion vectors delete."""
    found: dict[str, npt.NDArray[np.int64]] = {}
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return found
    try:
        vectors = load_pyarrow().table(table.deletion_vectors())
    except Exception as error:  # as above: whatever deltalake raises
        raise DataError(f"deltalake cannot read the deletion vectors of {table.table_uri}: {error}") from error
    for batch in vectors.to_batches():
        for url, keeps in zip(batch.column("filepath").to_pylist(), batch.column("selection_vector"), strict=True):
            found[unquote(url)] = np.flatnonzero(~keeps.values.to_numpy(zero_copy_only=False))
    return found


def _statistics(
    action: Mapping[str, Any], physical: Mapping[str, str], unbounded: Collection[str], *, is_exact: bool
) -> dict[str, Statistics]:
    """What the log says about a file's values: numbers, text, days and moments.

    With a deletion vector, bounds may be those of rows that are deleted, which does no harm, and counts of nulls are
    not exact.
    """
    found = {}
    for name, stored in physical.items():
        low, high, nulls = ((action.get(key) or {}).get(stored) for key in ("min", "max", "null_count"))
        if name in unbounded or not all(_is_bound(value) for value in (low, high)):
            low = high = None
        if isinstance(low, (dt.datetime, Decimal)):
            try:
                low, high = low - _step(low), high + _step(high)
            except OverflowError:
                low = high = None
        nulls = nulls if is_exact and isinstance(nulls, int) else None  # of a struct, the log has those of its fields
        found[name] = Statistics(rows=_rows(action), nulls=nulls, low=low, high=high)
    return found


def _is_bound(value: Any) -> bool:
    if isinstance(value, Decimal):
        return len(value.as_tuple().digits) <= _EXACT_DIGITS
    return isinstance(value, (int, float, str, dt.date)) and value == value


def _step(bound: Any) -> Any:
    """By how much a bound of the log may be off.

    The log has moments in milliseconds, and decimals as floating-point numbers.
    """
    if isinstance(bound, Decimal):
        return Decimal((0, (1,), int(bound.as_tuple().exponent)))
    return dt.timedelta(milliseconds=1)
