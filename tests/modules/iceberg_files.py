"""Delete files and metadata of Iceberg tables as Spark and Flink write them and pyiceberg cannot.

Source: "Iceberg Table Spec", sections "Delete Formats" and "Manifests"; "Puffin Spec", "deletion-vector-v1".
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import StaticTable
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.typedef import Record
from pyiceberg.utils.concurrent import ExecutorFactory
from pyroaring import BitMap


def start_threads() -> None:
    """Start all threads of pyiceberg, which serve the whole process: no test is the one that leaves them."""
    executor = ExecutorFactory.get_or_create()
    together = threading.Barrier(executor._max_workers)
    list(executor.map(lambda _: together.wait(), range(executor._max_workers)))


@contextlib.contextmanager
def catalog_in(folder: Path) -> Iterator[Any]:
    """A catalog in a database of sqlite, with the namespace "db"."""
    catalog = SqlCatalog("test", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace("db")
    try:
        yield catalog
    finally:
        catalog.close()


def data_files(table: Any) -> dict[Path, Any]:
    """Path -> manifest entry's file of each data file, in the order of their paths."""
    entries = [
        entry
        for manifest in table.current_snapshot().manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io)
        if entry.data_file.content == DataFileContent.DATA
    ]
    entries.sort(key=lambda entry: (entry.sequence_number, entry.data_file.file_path))
    return {Path(entry.data_file.file_path.removeprefix("file://")): entry.data_file for entry in entries}


class DeleteWriter(ManifestWriterV2):
    """Writes manifests of delete files, with the fields of version 3."""

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    def new_writer(self) -> Any:
        from pyiceberg.avro.file import AvroOutputFile

        schema = self._with_partition(3)
        return AvroOutputFile(self._output_file, schema, "manifest_entry", record_schema=schema, metadata=self._meta)


def add_deletes(
    table: Any,
    rows: pa.Table,
    *,
    equality: Sequence[str] = (),
    partition: Sequence[Any] = (),
    spec_id: int | None = None,
    file_format: str = "PARQUET",
) -> None:
    """Commit a file of position deletes, or of equality deletes on the named columns, to a partition of a spec.

    It is the newest spec by default.
    """
    path = Path(table.location().removeprefix("file://")) / "data" / f"delete-{uuid.uuid4()}.parquet"
    if equality:
        known = schema_to_pyarrow(table.schema())
        fields = [known.field(name).with_nullable(True) for name in rows.column_names]
        rows = rows.cast(pa.schema([pa.field(one.name, one.type) for one in fields]))
        rows = pa.table(rows.columns, schema=pa.schema(fields))
    else:
        ids = {"file_path": "2147483546", "pos": "2147483545"}
        fields = [field.with_metadata({"PARQUET:field_id": ids[field.name]}) for field in rows.schema]
        rows = pa.table(rows.columns, schema=pa.schema(fields))
    pq.write_table(rows, path)
    given = {
        "content": DataFileContent.EQUALITY_DELETES if equality else DataFileContent.POSITION_DELETES,
        "file_format": FileFormat(file_format),
        "partition": Record(*partition),
        "equality_ids": [table.schema().find_field(name).field_id for name in equality] or None,
    }
    commit_deletes(table, [file_of(path, rows.num_rows, **given)], spec_id)


def add_vector(table: Any, deleted: Mapping[Path, Sequence[int]]) -> Any:
    """The table with a Puffin file of deletion vectors, as one of version 3."""
    blobs, metadata, files, offset = [], [], [], 4
    path = Path(table.location().removeprefix("file://")) / "data" / f"delete-{uuid.uuid4()}.puffin"
    for target, rows in deleted.items():
        vector = struct.pack("<QI", 1, 0) + BitMap(rows).serialize()
        content = bytes.fromhex("d1d33964") + vector
        blob = struct.pack(">I", len(content)) + content + struct.pack(">I", zlib.crc32(content))
        url = f"file://{target}"
        properties = {"referenced-data-file": url, "cardinality": str(len(rows))}
        where = {"offset": offset, "length": len(blob)}
        metadata.append(
            {"type": "deletion-vector-v1", "fields": [], "snapshot-id": -1, "sequence-number": -1, **where}
            | {"properties": properties}
        )
        files.append(
            file_of(
                path,
                len(rows),
                content=DataFileContent.POSITION_DELETES,
                file_format=FileFormat.PUFFIN,
                referenced_data_file=url,
                content_offset=offset,
                content_size_in_bytes=len(blob),
            )
        )
        blobs.append(blob)
        offset += len(blob)
    footer = json.dumps({"blobs": metadata}).encode()
    end = struct.pack("<I", len(footer)) + b"\0\0\0\0" + b"PFA1"
    path.write_bytes(b"PFA1" + b"".join(blobs) + b"PFA1" + footer + end)
    commit_deletes(table, files)
    return as_version_3(table)


def as_version_3(table: Any, change: Callable[[dict[str, Any]], None] = lambda _: None) -> Any:
    """The table with metadata of version 3 of the format, and a change."""
    path = Path(table.metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    metadata |= {"format-version": 3, "next-row-id": 1_000_000}
    for snapshot in metadata["snapshots"]:
        snapshot |= {"first-row-id": 0, "added-rows": 0}
    change(metadata)
    new = path.with_name(f"v3-{uuid.uuid4()}.metadata.json")
    new.write_text(json.dumps(metadata))
    return StaticTable.from_metadata(str(new))


def file_of(path: Path, rows: int, *, spec_id: int = 0, **given: Any) -> DataFile:
    """What a manifest says about a file."""
    known = {"file_path": f"file://{path}", "record_count": rows, "file_size_in_bytes": 1, "partition": Record()}
    empty = dict.fromkeys(("column_sizes", "value_counts", "null_value_counts", "nan_value_counts"))
    file = DataFile.from_args(3, **{**known, **empty, **given})
    file.spec_id = spec_id
    return file


def commit_deletes(table: Any, files: Sequence[DataFile], spec_id: int | None = None) -> None:
    """Commit a snapshot with a manifest of these delete files."""
    current, number = table.current_snapshot(), uuid.uuid4().int >> 66
    folder = f"{table.location()}/metadata"
    spec = table.spec() if spec_id is None else table.specs()[spec_id]
    manifest = table.io.new_output(f"{folder}/{uuid.uuid4()}-m0.avro")
    with DeleteWriter(spec, table.schema(), manifest, number, "deflate") as writer:
        for file in files:
            entry = ManifestEntry.from_args(3, status=ManifestEntryStatus.ADDED, snapshot_id=number, data_file=file)
            writer.add_entry(entry)
    sequence_number = table.metadata.last_sequence_number + 1
    url = f"{folder}/snap-{number}.avro"
    with write_manifest_list(
        2, table.io.new_output(url), number, current.snapshot_id, sequence_number, "deflate"
    ) as listed:
        listed.add_manifests([*current.manifests(table.io), writer.to_manifest_file()])
    snapshot = Snapshot(
        snapshot_id=number,
        parent_snapshot_id=current.snapshot_id,
        manifest_list=url,
        sequence_number=sequence_number,
        summary=Summary(Operation.DELETE),
        schema_id=table.schema().schema_id,
    )
    branch = SetSnapshotRefUpdate(
        snapshot_id=number, parent_snapshot_id=current.snapshot_id, ref_name="main", type="branch"
    )
    table._do_commit((AddSnapshotUpdate(snapshot=snapshot), branch), ())
