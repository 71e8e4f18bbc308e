"""petastorm data sets written by this process.

Encoded rows in Parquet files, then the metadata beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hvd_cluster.data.files.filesystems import UnfinishedFile
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import metadata, type_mapping
from hvd_cluster.petastorm.fragments import parquet_files_if_any
from hvd_cluster.petastorm.location import Location, Url, locate
from hvd_cluster.petastorm.unischema import Unischema, encode_row

#: Bytes of encoded rows in a row group, before compression.
ROW_GROUP_MB = 32
_MIB = 1 << 20


def write_dataset(
    dataset_url: Url,
    schema: Unischema,
    rows: Iterable[Mapping[str, Any]],
    *,
    row_group_size_mb: float = ROW_GROUP_MB,
    row_group_rows: int | None = None,
    rows_per_file: int | None = None,
    compression: str = "snappy",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> int:
    """Write a petastorm data set that we, and petastorm 0.13.1, read.

    A file appears under its name when it is complete; the metadata comes last. An exception removes what was written.

    Args:
        dataset_url: URL or local path of a folder without Parquet files.
        schema: of the rows.
        rows: dicts of the fields' values, before encoding.
        row_group_size_mb: MiB of encoded rows in a row group.
        row_group_rows: rows in a row group, at most.
        rows_per_file: rows in a file, at most; None for one file.
        compression: of the Parquet columns.
        storage_options, filesystem: as ``make_reader`` takes them.

    Returns:
        The number of rows.

    Raises:
        DataError: the folder holds data, there are no rows, or a value is not what its field says (the row is named).
        OSError: the folder cannot be written.
    """
    if row_group_size_mb <= 0 or (row_group_rows or 1) < 1 or (rows_per_file or 1) < 1:
        raise DataError("row_group_size_mb, row_group_rows and rows_per_file are above 0")
    location = locate(dataset_url, storage_options, filesystem)
    _require_empty(location)
    writer = _Files(location, type_mapping.of_fields(schema.fields.values()), rows_per_file, compression)
    count = 0
    try:
        for group in _groups(schema, rows, row_group_size_mb * _MIB, row_group_rows, rows_per_file):
            writer.add(group)
            count += len(group)
        writer.close()
        if not count:
            raise DataError(f"there are no rows to write to {location.text}")
        metadata.generate(location, schema)
    except BaseException:  # raised again: half a data set must not stay
        writer.remove()
        raise
    return count


@contextmanager
def generated_metadata(
    dataset_url: Url, schema: Unischema, storage_options: Mapping[str, Any] | None = None, filesystem: Any = None
) -> Iterator[None]:
    """A context in which encoded rows are written as Parquet by any means.

    Its end writes petastorm's metadata.

    Raises:
        PetastormMetadataGenerationError: the block wrote no Parquet, or other columns than the schema's.
    """
    type_mapping.of_fields(schema.fields.values())  # says what is wrong with the schema before hours of writing
    yield
    metadata.generate(locate(dataset_url, storage_options, filesystem), schema)


def _require_empty(location: Location) -> None:
    existing = parquet_files_if_any(location)
    if existing:
        raise DataError(
            f"{location.text} holds Parquet already ({existing[0][1]}): choose another folder, or delete it"
        )


def _groups(
    schema: Unischema,
    rows: Iterable[Mapping[str, Any]],
    group_bytes: float,
    group_rows: int | None,
    rows_per_file: int | None,
) -> Iterator[list[dict[str, Any]]]:
    """Encoded rows, a row group at a time; no row group goes over the end of a file."""
    waiting: list[dict[str, Any]] = []
    size = 0
    number = 0
    for number, row in enumerate(rows):
        try:
            encoded = encode_row(schema, row)
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
        waiting.append(encoded)
        size += sum(len(value) if isinstance(value, (bytes, str)) else 8 for value in encoded.values())
        ends_file = rows_per_file is not None and (number + 1) % rows_per_file == 0
        if size >= group_bytes or len(waiting) == group_rows or ends_file:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


class _Files:
    """Parquet files of a folder, one after the other."""

    def __init__(self, location: Location, schema: Any, rows_per_file: int | None, compression: str) -> None:
        self._location = location
        self._schema = schema
        self._rows_per_file = rows_per_file
        self._compression = compression
        self._written: list[str] = []
        self._file: UnfinishedFile | None = None
        self._rows = 0

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Write a row group."""
        pyarrow, parquet = load_pyarrow(), load_pyarrow("pyarrow.parquet")
        if self._file is None:
            filesystem, folder = self._location.filesystem, self._location.paths[0]
            filesystem.create_dir(folder, recursive=True)
            path = f"{folder}/part-{len(self._written):05d}.parquet"
            make = functools.partial(parquet.ParquetWriter, schema=self._schema, compression=self._compression)
            self._file = UnfinishedFile(filesystem, path, make)
            self._written.append(path)
        try:
            table = pyarrow.Table.from_pylist(rows, schema=self._schema)
        except (pyarrow.ArrowException, TypeError, OverflowError) as error:
            raise DataError(f"the encoded rows do not fit {self._schema}: {error}") from error
        with self._file.writing():
            self._file.writer.write_table(table, row_group_size=max(1, len(rows)))
        self._rows += len(rows)
        if self._rows_per_file is not None and self._rows >= self._rows_per_file:
            self.close()

    def close(self) -> None:
        """Complete the file in progress."""
        if self._file is not None:
            self._file.complete()
            self._file, self._rows = None, 0

    def remove(self) -> None:
        """Remove all that was written."""
        if self._file is not None:
            self._file.abandon()
            self._file = None
        for path in self._written:
            with suppress(FileNotFoundError):  # not completed, or another process was faster
                self._location.filesystem.delete_file(path)
        self._written.clear()
