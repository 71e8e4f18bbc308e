"""Commits to a Delta table as Spark writes them and deltalake cannot, from the protocol's specification.

Source: "Delta Transaction Log Protocol" (PROTOCOL.md of delta-io/delta), "Deletion Vectors" and "Column Mapping".
"""

from __future__ import annotations

import base64
import json
import struct
import uuid
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_MAGIC = 1681511377


def actions(table: Path) -> list[dict[str, Any]]:
    """All actions of the log, oldest first. The log has no checkpoint."""
    return [
        json.loads(line)
        for file in sorted((table / "_delta_log").glob("*.json"))
        for line in file.read_text().splitlines()
    ]


def live_adds(table: Path) -> dict[str, dict[str, Any]]:
    """Path -> the add action of each file of the newest version."""
    adds: dict[str, dict[str, Any]] = {}
    for action in actions(table):
        if "remove" in action:
            adds.pop(action["remove"]["path"], None)
        if "add" in action:
            adds[action["add"]["path"]] = action["add"]
    return adds


def newest(table: Path, kind: str) -> dict[str, Any]:
    """The last action of a kind: "metaData" or "protocol"."""
    return [action[kind] for action in actions(table) if kind in action][-1]


def commit(table: Path, *found: Mapping[str, Any]) -> None:
    """Write the next version."""
    log = table / "_delta_log"
    version = 1 + max(int(file.stem) for file in log.glob("*.json"))
    info = {"commitInfo": {"timestamp": 1_700_000_000_000 + version, "operation": "WRITE", "operationParameters": {}}}
    (log / f"{version:020}.json").write_text("".join(f"{json.dumps(action)}\n" for action in (info, *found)))


def append(table: Path, rows: pa.Table, partitions: Sequence[str]) -> None:
    """Commit files of rows, all under the names that columns have in files; one for each partition."""
    written = []
    for values in {tuple(row.values()) for row in rows.select(list(partitions)).to_pylist()}:
        part = rows
        for name, value in zip(partitions, values, strict=True):
            column = part.column(name)
            part = part.filter(pc.is_null(column) if value is None else pc.equal(column, value))
        name = f"{uuid.uuid4()}.parquet"
        pq.write_table(part.drop_columns(list(partitions)), table / name)
        add = {"path": name, "size": (table / name).stat().st_size, "dataChange": True}
        texts = [None if value is None else str(value) for value in values]
        add |= {"modificationTime": 1, "partitionValues": dict(zip(partitions, texts, strict=True))}
        written.append({"add": {**add, "stats": json.dumps({"numRecords": len(part)})}})
    commit(table, *written)


def add_column(table: Path, name: str) -> None:
    """Commit another column of int64."""
    metadata = newest(table, "metaData")
    schema = json.loads(metadata["schemaString"])
    schema["fields"].append({"name": name, "type": "long", "nullable": True, "metadata": {}})
    commit(table, {"metaData": {**metadata, "schemaString": json.dumps(schema)}})
    if "delta.columnMapping.mode" in metadata["configuration"]:
        map_columns(table, {})


def protocol(table: Path, *features: str) -> dict[str, Any]:
    """An action that adds reader features to those of the table."""
    known = {*newest(table, "protocol").get("readerFeatures", ()), *features}
    names = sorted(known)
    return {
        "protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names, "writerFeatures": names}
    }


def delete_rows(table: Path, path: str, rows: Collection[int], *, inline: bool = False) -> None:
    """Commit a deletion vector that has exactly these rows of a file."""
    add = live_adds(table)[path]
    bitmap = BitMap(rows).serialize()
    content = struct.pack("<I", _MAGIC) + struct.pack("<Q", 1) + struct.pack("<I", 0) + bitmap
    vector: dict[str, Any] = {"sizeInBytes": len(content), "cardinality": len(rows)}
    if inline:
        vector |= {"storageType": "i", "pathOrInlineDv": _z85(content)}
    else:
        name = uuid.uuid4()
        checksum = struct.pack(">I", zlib.crc32(content))
        (table / f"deletion_vector_{name}.bin").write_bytes(
            b"\1" + struct.pack(">I", len(content)) + content + checksum
        )
        vector |= {"storageType": "u", "pathOrInlineDv": _z85(name.bytes), "offset": 1}
    removed = {"path": path, "dataChange": True, "deletionTimestamp": 1, "partitionValues": add["partitionValues"]}
    if "deletionVector" in add:
        removed["deletionVector"] = add["deletionVector"]
    stats = {**json.loads(add["stats"]), "tightBounds": False}
    added = {**add, "deletionVector": vector, "stats": json.dumps(stats)}
    upgrade = (
        []
        if "deletionVectors" in newest(table, "protocol").get("readerFeatures", ())
        else [protocol(table, "deletionVectors")]
    )
    commit(table, *upgrade, {"remove": removed}, {"add": added})


def _z85(content: bytes) -> str:
    padded = content + b"\0" * (-len(content) % 4)
    return base64.b85encode(padded).decode().translate(str.maketrans(_B85, _Z85))


def map_columns(table: Path, renamed: Mapping[str, str], mode: str = "name") -> None:
    """Commit column mapping: columns are called by new names, and keep their names in files."""
    metadata = newest(table, "metaData")
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"], start=1):
        field["metadata"].setdefault("delta.columnMapping.physicalName", field["name"])
        field["metadata"]["delta.columnMapping.id"] = number
        field["name"] = renamed.get(field["name"], field["name"])
    configuration = {**metadata["configuration"], "delta.columnMapping.mode": mode}
    configuration["delta.columnMapping.maxColumnId"] = str(len(schema["fields"]))
    changed = {**metadata, "schemaString": json.dumps(schema), "configuration": configuration}
    changed["partitionColumns"] = [renamed.get(name, name) for name in metadata["partitionColumns"]]
    commit(table, protocol(table, "columnMapping"), {"metaData": changed})
