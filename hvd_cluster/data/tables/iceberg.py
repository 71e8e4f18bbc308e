"""Iceberg tables, whose metadata and manifests pyiceberg reads.

The Parquet files of the snapshot are read as any other. What a reader must know is in the "Iceberg Table Spec"
(versions 1 to 3), in "Column Projection" and "Delete Formats".
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from hvd_cluster.data.files.filesystems import as_filesystem, normalize
from hvd_cluster.data.filters import RowFilter, Statistics
from hvd_cluster.data.optional import load_extra, load_pyarrow
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables import iceberg_partitions, object_store
from hvd_cluster.data.tables.iceberg_deletes import Deletes, entries_of
from hvd_cluster.data.tables.snapshot_files import FieldNames, ListedFile, SnapshotFiles
from hvd_cluster.data.tables.table_source import Snapshot, epoch_ms, gone_text
from hvd_cluster.errors import DataError

_FORMAT_VERSIONS = (1, 2, 3)
#: Types whose bounds are used.
_BOUNDED = {"int", "long", "float", "double", "string", "date", "timestamp", "timestamptz", "decimal"}


def at(
    url: str,
    version: int | str | None,
    moment: dt.datetime | None,
    storage_options: Mapping[str, Any] | None,
) -> SnapshotFiles:
    """The table of a metadata file, or of a folder that says which one is current.

    Args:
        url: path or URL of the folder, or of a ``.metadata.json`` file.
        version: None for the newest.
        moment: the snapshot at this time.
        storage_options: properties of pyiceberg's ``FileIO``, or arguments for fsspec's filesystem.
    """
    module = load_extra("pyiceberg.table", "iceberg", "to read Iceberg tables")
    try:
        table = module.StaticTable.from_metadata(url, object_store.iceberg_properties(url, storage_options))
    except FileNotFoundError as error:
        raise DataError(
            f"cannot open the Iceberg table in {url!r}: without a file metadata/version-hint.text, only its catalog "
            "knows which metadata file is current: give the pyiceberg Table, catalog.load_table(name), or the path of "
            f"a .metadata.json file ({error})"
        ) from error
    except Exception as error:  # pyiceberg raises those of its filesystem and of pydantic too
        raise DataError(f"cannot open the Iceberg table in {url!r}: {error}") from error
    return of_object(table, version, moment)


def of_object(table: Any, version: int | str | None, moment: dt.datetime | None) -> SnapshotFiles:
    """The snapshot of a ``pyiceberg.table.Table``; by default the newest loaded."""
    metadata, place = table.metadata, table.location()
    if metadata.format_version not in _FORMAT_VERSIONS:
        raise DataError(f"the Iceberg table {place!r} has format version {metadata.format_version}: 1 to 3 are read")
    named, of_schema = _of_schema(table, version)
    chosen = _chosen(table, named, moment)
    if chosen is None:
        if version is None and moment is None:
            raise DataError(f"the Iceberg table {place!r} has no rows yet")
        when = f"snapshot {version!r}" if moment is None else f"snapshot as of {moment}"
        known = [one.snapshot_id for one in table.snapshots()]
        raise DataError(f"the Iceberg table {place!r} has no {when}: its snapshots are {known}")
    # What is current, a branch too, has the table's schema, and what is past has that of its time.
    is_past = moment is not None or (version is not None and not _is_branch(table, version))
    own = table.schemas().get(chosen.schema_id, table.schema())
    schema = of_schema or (own if is_past else table.schema())
    suffix = "" if schema.schema_id == own.schema_id else f"@schema{schema.schema_id}"
    snapshot = Snapshot(
        format="Iceberg",
        table=place,
        version=f"{chosen.snapshot_id}{suffix}",
        table_id=f"{metadata.table_uuid} schema {schema.schema_id}",
    )
    with _clear_errors(snapshot):
        return _source(table, snapshot, chosen, schema)


def _is_branch(table: Any, version: int | str) -> bool:
    """Whether a version is the name of a branch, whose newest snapshot it means."""
    found = table.metadata.refs.get(version)
    return found is not None and found.snapshot_ref_type.value == "branch"


def _of_schema(table: Any, version: int | str | None) -> tuple[int | str | None, Any]:
    """A ``Snapshot.version`` -> the snapshot, and the schema that it names or None."""
    found = re.fullmatch(r"(\d+)@schema(\d+)", version) if isinstance(version, str) else None
    if found is None or version in table.metadata.refs:
        return version, None
    known = table.schemas()
    schema = known.get(int(found[2]))
    if schema is None:
        raise DataError(
            f"the Iceberg table {table.location()!r} has no schema {found[2]}: its schemas are {sorted(known)}"
        )
    return int(found[1]), schema


def _chosen(table: Any, version: int | str | None, moment: dt.datetime | None) -> Any:
    if moment is not None:
        return table.snapshot_as_of_timestamp(epoch_ms(moment))
    if version is None:
        return table.current_snapshot()
    if isinstance(version, str) and (version in table.metadata.refs or not version.isdecimal()):
        return table.snapshot_by_name(version)
    return table.snapshot_by_id(int(version))


@contextlib.contextmanager
def _clear_errors(snapshot: Snapshot) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(gone_text(snapshot, str(error))) from error
    except Exception as error:  # as above: whatever pyiceberg raises
        raise DataError(f"cannot read {snapshot}: {error}") from error


def _source(table: Any, snapshot: Snapshot, chosen: Any, schema: Any) -> SnapshotFiles:
    with_ids = load_extra("pyiceberg.io.pyarrow", "iceberg", "to read Iceberg tables").schema_to_pyarrow(schema)
    arrow_schema = load_pyarrow().schema([one.with_type(_small(one.type)).remove_metadata() for one in with_ids])
    mapping = (
        {} if table.name_mapping() is None else {one.field_id: tuple(one.names) for one in table.name_mapping().root}
    )
    fields = FieldNames(
        names={one.name: mapping[one.field_id] for one in schema.fields if one.field_id in mapping},
        ids={one.name: one.field_id for one in schema.fields},
        nested={one.name: one.type for one in with_ids if load_pyarrow("pyarrow.types").is_nested(one.type)},
        filled={number for number in schema.field_ids if schema.find_field(number).initial_default is not None},
    )
    entries = [entry for manifest in chosen.manifests(table.io) for entry in entries_of(manifest, table.io)]
    data = [entry for entry in entries if int(entry.data_file.content) == 0]
    _require_plain_files(entries, snapshot)
    places = _Places(table)
    deletes = Deletes(table, places, snapshot, [entry for entry in entries if int(entry.data_file.content) != 0])
    data.sort(key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))
    files = [
        _listed(entry, table, schema, arrow_schema, places.inside(entry.data_file.file_path), deletes) for entry in data
    ]
    return IcebergFiles(places.filesystem, arrow_schema, snapshot, files, fields, schema=schema, specs=table.specs())


class IcebergFiles(SnapshotFiles):
    """A snapshot of an Iceberg table.

    Args:
        given: see :class:`SnapshotFiles`.
        schema: the ``pyiceberg.schema.Schema`` of the snapshot.
        specs: id -> the ``pyiceberg.partitioning.PartitionSpec`` of files.
    """

    def __init__(self, *given: Any, schema: Any, specs: Mapping[int, Any]) -> None:
        super().__init__(*given)
        # As text, because workers need no pyiceberg.
        self._schema = schema.model_dump_json()
        self._specs = {number: spec.model_dump_json() for number, spec in specs.items()}

    def may_match(self, row_filter: RowFilter | None) -> Callable[[ListedFile], bool]:
        by_bounds = super().may_match(row_filter)
        if row_filter is None:
            return by_bounds
        by_partition = iceberg_partitions.may_match_by_spec(row_filter, self.arrow_schema, self._schema, self._specs)
        return lambda file: by_bounds(file) and by_partition[file.partition[0]](file.partition[1])


def _require_plain_files(entries: Sequence[Any], snapshot: Snapshot) -> None:
    """Refuse what cannot be read, by name."""
    wrong = {
        f"data files in {name}"
        for entry in entries
        for name in [entry.data_file.file_format.name]
        if name != "PARQUET" and int(entry.data_file.content) == 0
    }
    wrong |= {
        f"delete files in {name}"
        for entry in entries
        for name in [entry.data_file.file_format.name]
        if name not in {"PARQUET", "PUFFIN"} and int(entry.data_file.content) != 0
    }
    if any(entry.data_file.key_metadata for entry in entries):
        wrong.add("encrypted files")
    if wrong:
        raise DataError(
            f"{snapshot} has {' and '.join(sorted(wrong))}, which is not supported: read it with Spark, and give the "
            "DataFrame to fit() or materialize()"
        )


class _Places:
    """Where the files of a table are; all must be in one filesystem."""

    def __init__(self, table: Any) -> None:
        self._io = table.io
        self._url = table.location()
        self._place, _ = self._found(self._url)
        #: The Store or ``pyarrow.fs.FileSystem`` of the files.
        self.filesystem: Any = self._opened()

    def _opened(self) -> Any:
        """What serves the table's own folder, with the credentials of its ``FileIO``."""
        if hasattr(self._io, "fs_by_scheme"):  # of pyarrow
            return self._io.fs_by_scheme(*self._place)
        if hasattr(self._io, "get_fs"):  # of fsspec
            return as_filesystem(self._io.get_fs(self._place[0] or "file", urlsplit(self._url).hostname))
        return Store.create(self._url)

    def _found(self, url: str) -> tuple[tuple[str, str], str]:
        """Scheme and host of a file, and its path inside the filesystem of these."""
        if hasattr(self._io, "fs_by_scheme"):
            scheme, netloc, path = self._io.parse_location(url, self._io.properties)
            return (scheme, netloc), str(path)
        parts = urlsplit(url)
        if hasattr(self._io, "get_fs"):
            place = (parts.scheme, parts.netloc)
            return place, str(self._io.get_fs(parts.scheme or "file", parts.hostname)._strip_protocol(url))
        return ("", ""), Store.create(self._url).get_localized_path(normalize(url))

    def inside(self, url: str) -> str:
        """The path of a file inside the filesystem."""
        place, path = self._found(url)
        if place != self._place:
            raise DataError(
                f"the Iceberg table {self._url!r} has a file in another place, which is not supported: {url}"
            )
        return path


def _listed(entry: Any, table: Any, schema: Any, arrow_schema: Any, path: str, deletes: Deletes) -> ListedFile:
    file = entry.data_file
    defaults = {
        one.name: load_pyarrow().scalar(one.initial_default, arrow_schema.field(one.name).type).as_py()
        for one in schema.fields
        if one.initial_default is not None
    }
    names = {one.field_id: one.name for one in schema.fields}
    spec_id = file.spec_id or 0
    spec = table.specs()[spec_id]
    for number, one in enumerate(spec.fields):
        if str(one.transform) == "identity" and one.source_id in names:
            name = names[one.source_id]
            defaults[name] = _value(file.partition[number], arrow_schema.field(name).type)
    rows = deletes.rows_of(entry)
    return ListedFile(
        path=path,
        rows=int(file.record_count),
        defaults=defaults,
        statistics=_statistics(file, schema, arrow_schema, is_exact=rows is None),
        deleted=rows,
        partition=(spec_id, tuple(file.partition)),
    )


def _value(value: Any, arrow_type: Any) -> Any:
    """A partition value as Python has it: Iceberg counts days and microseconds."""
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    if isinstance(value, int) and types.is_temporal(arrow_type):
        number = pyarrow.int32() if types.is_date32(arrow_type) else pyarrow.int64()
        return pyarrow.scalar(value, number).cast(arrow_type).as_py()
    return value


def _statistics(file: Any, schema: Any, arrow_schema: Any, *, is_exact: bool) -> dict[str, Statistics]:
    """What the manifest says about a file's values: numbers, text, days and times.

    Where rows are deleted, bounds may be those of deleted rows, which does no harm, and counts of nulls are not exact.
    """
    from_bytes = load_extra("pyiceberg.conversions", "iceberg", "to read Iceberg tables").from_bytes
    found = {}
    for one in schema.fields:
        bounds = [(known or {}).get(one.field_id) for known in (file.lower_bounds, file.upper_bounds)]
        low = high = None
        if str(one.field_type).partition("(")[0] in _BOUNDED and None not in bounds:
            arrow_type = arrow_schema.field(one.name).type
            with contextlib.suppress(Exception):  # bounds that were written before the type was widened
                low, high = (_value(from_bytes(one.field_type, bound), arrow_type) for bound in bounds)
        if low != low or high != high:  # NaN bounds nothing
            low = high = None
        nulls = (file.null_value_counts or {}).get(one.field_id) if is_exact else None
        found[one.name] = Statistics(rows=int(file.record_count), nulls=nulls, low=low, high=high)
    return found


def _small(arrow_type: Any) -> Any:
    """The type with offsets of 32 bits, which files have, in place of pyiceberg's 64."""
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    if types.is_large_string(arrow_type):
        return pyarrow.string()
    if types.is_large_binary(arrow_type):
        return pyarrow.binary()
    if types.is_large_list(arrow_type) or types.is_list(arrow_type):
        return pyarrow.list_(_small(arrow_type.value_type))
    if types.is_struct(arrow_type):
        return pyarrow.struct([one.with_type(_small(one.type)).remove_metadata() for one in arrow_type])
    return arrow_type
