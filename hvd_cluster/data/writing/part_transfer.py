"""Partitions of a data set that travel as rows.

They are written where they are made, cut into bytes, and assembled elsewhere. The files are those that ``materialize``
writes of the same partitions, in Arrow's format, so that a reader makes the same batches of them; no shared file system
is needed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.files.filesystems import unwritable_text
from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing import assembly
from hvd_cluster.data.writing.part_file import PartPlan
from hvd_cluster.data.writing.part_writer import write_part
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: The rows that travel: number of the partition; name of the file; where in it the bytes belong; the bytes.
SCHEMA = "part int, name string, at bigint, data binary"
#: Bytes of a row. Spark hands 10,000 rows at a time to Python.
CHUNK_BYTES = 16 * 1024

_REPORT = "report-{part:05d}.json"


def pack_part(plan: PartPlan, part: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a partition to this machine's disk, and yield it as rows of SCHEMA.

    Errors that the user can fix go with the rows, as a message in the report.
    """
    with scratch_folder("part") as folder:
        store = Store.create(folder)
        local = replace(
            plan,
            store=store,
            train_folder=store.get_train_data_path(),
            validation_folder=store.get_val_data_path(),
            format="arrow",
        )
        try:
            report = write_part(local, part, batches).to_json()
        except DataError as error:
            report = {"error": str(error)}
        except OSError as error:
            report = {"error": unwritable_text(folder, error)}
        checksum = 0
        for path in sorted(Path(folder).rglob("part-*")):
            name = f"{path.parent.name}.{path.name}"
            with path.open("rb") as file:
                at = 0
                while data := file.read(CHUNK_BYTES * 256):
                    yield _rows(part, name, at, data)
                    at += len(data)
                    checksum = zlib.crc32(data, checksum)
        yield _rows(part, _REPORT.format(part=part), 0, json.dumps({**report, "checksum": checksum}).encode())


def _rows(part: int, name: str, at: int, data: bytes) -> pa.RecordBatch:
    pyarrow = load_pyarrow()
    starts = range(0, len(data), CHUNK_BYTES)
    return pyarrow.RecordBatch.from_arrays(
        [
            pyarrow.array([part] * len(starts), pyarrow.int32()),
            pyarrow.array([name] * len(starts), pyarrow.string()),
            pyarrow.array([at + start for start in starts], pyarrow.int64()),
            pyarrow.array([data[start : start + CHUNK_BYTES] for start in starts], pyarrow.binary()),
        ],
        names=["part", "name", "at", "data"],
    )


@contextlib.contextmanager
def received(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, str]]:
    """Put rows of SCHEMA, in any order, together in a folder of this machine.

    The folder goes with the context.

    Yields:
        The variable that passes the folder to a worker.
    """
    with scratch_folder("rows") as folder:
        for batch in batches:
            try:
                _keep(batch.to_pylist(), folder)
            except OSError as error:
                raise DataError(unwritable_text(folder, error)) from error
        yield {"HOROVOD_ROWS_DIR": folder}


def _keep(rows: Iterable[Mapping[str, Any]], folder: str) -> None:
    for row in rows:
        descriptor = os.open(Path(folder, row["name"]), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.pwrite(descriptor, row["data"], row["at"]) < len(row["data"]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def reports_in(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Name -> content of the reports of the partitions whose files are in a folder."""
    return {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("report-*.json"))}


def digest(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Identifies these rows in this order."""
    return f"{zlib.crc32(repr([reports[name]['checksum'] for name in sorted(reports)]).encode()):08x}"


def files_in(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Name -> size of the files with rows in a folder."""
    return {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir()) if ".part-" in path.name}


def assembled(plan: PartPlan, reports: Collection[dict[str, Any]], folder_of: dict[str, str], lanes: int) -> Dataset:
    """The data set of all partitions.

    Args:
        plan: what it was written by.
        reports: of all partitions, in any order.
        folder_of: name of a file -> the folder where this process finds it.
        lanes: streams that the order is interleaved from.
    """
    parts = assembly.parts_of(reports)
    for part in parts:
        part.train, part.validation = (
            [_moved(group, folder_of) for group in groups] for groups in (part.train, part.validation)
        )
    dataset = assembly.assembled(plan, parts, plan.store, lanes)
    return replace(dataset, store=Store.create(Path(dataset.train.row_groups[0].path).parent))


def _moved(group: RowGroup, folder_of: dict[str, str]) -> RowGroup:
    path = Path(group.path)
    name = f"{path.parent.name}.{path.name}"
    return replace(group, path=f"{folder_of[name]}/{name}")
