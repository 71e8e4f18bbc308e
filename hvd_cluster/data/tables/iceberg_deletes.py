"""Which rows of an Iceberg table's data files are deleted.

Rows are deleted by deletion vectors, by position, and by equal values. Source: "Iceberg Table Spec", sections "Scan
Planning" (which delete applies to which file) and "Delete Formats".
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.files.filesystems import as_filesystem
from hvd_cluster.data.optional import load_extra, load_pyarrow
from hvd_cluster.data.reading.common_schema import as_type
from hvd_cluster.data.tables.snapshot_files import FIELD_ID
from hvd_cluster.data.tables.table_source import Snapshot
from hvd_cluster.errors import DataError

Positions = npt.NDArray[np.int64]


#: Ids in "Data File Fields" of the spec.
_REFERENCED_DATA_FILE = 143


def entries_of(manifest: Any, io: Any) -> list[Any]:
    """The live entries of a manifest.

    Those of delete files have version 3's fields, which pyiceberg leaves out.
    """
    if int(manifest.content) == 0:
        return list(manifest.fetch_manifest_entry(io))
    module = load_extra("pyiceberg.manifest", "iceberg", "to read Iceberg tables")
    avro = load_extra("pyiceberg.avro.file", "iceberg", "to read Iceberg tables")
    with avro.AvroFile(
        io.new_input(manifest.manifest_path),
        module.MANIFEST_ENTRY_SCHEMAS[3],
        read_types={-1: module.ManifestEntry, 2: module.DataFile},
        read_enums={0: module.ManifestEntryStatus, 101: module.FileFormat, 134: module.DataFileContent},
    ) as entries:
        live = [entry for entry in entries if entry.status != module.ManifestEntryStatus.DELETED]
        return [module._inherit_from_manifest(entry, manifest) for entry in live]


def _target_of(file: Any) -> str:
    """The data file of a deletion vector."""
    module = load_extra("pyiceberg.manifest", "iceberg", "to read Iceberg tables")
    ids = [one.field_id for one in module.DATA_FILE_TYPE[3].fields]
    return str(file[ids.index(_REFERENCED_DATA_FILE)])


class Deletes:
    """The delete files of a snapshot.

    Args:
        table: the ``pyiceberg.table.Table``.
        places: finds files; has ``filesystem`` and ``inside(url)``.
        snapshot: for messages.
        entries: manifest entries of the delete files.
    """

    def __init__(self, table: Any, places: Any, snapshot: Snapshot, entries: Sequence[Any]) -> None:
        self._table, self._places, self._snapshot = table, places, snapshot
        #: Path of a data file -> (sequence number, positions) of each delete.
        self._vectors: dict[str, list[tuple[int, Positions]]] = defaultdict(list)
        self._positions: dict[str, list[tuple[int, Positions]]] = defaultdict(list)
        self._equalities = []
        #: Columns of files that equality deletes look at.
        self._known: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
        for entry in entries:
            if entry.data_file.file_format.name == "PUFFIN":
                self._add_vector(entry)
            elif int(entry.data_file.content) == 1:
                self._add_positions(entry)
            else:
                self._equalities.append(entry)

    def rows_of(self, entry: Any) -> Positions | None:
        """The numbers of a data file's deleted rows, ascending, each once; None for none."""
        number, path = entry.sequence_number or 0, entry.data_file.file_path
        vectors = [rows for at, rows in self._vectors.get(path, ()) if at >= number]
        # A deletion vector holds the positions of the delete files that came before it.
        found = vectors or [rows for at, rows in self._positions.get(path, ()) if at >= number]
        found += [self._equal(delete, entry) for delete in self._equalities if self._applies(delete, entry)]
        return np.unique(np.concatenate(found)) if found else None

    def _add_vector(self, entry: Any) -> None:
        module = load_extra("pyiceberg.table.deletion_vector", "iceberg", "to read Iceberg tables")
        puffin = load_extra("pyiceberg.table.puffin", "iceberg", "to read Iceberg tables").PuffinFile
        path, target = entry.data_file.file_path, _target_of(entry.data_file)
        with self._table.io.new_input(path).open() as stream:
            vectors = module.deletion_vectors_from_puffin_file(puffin(stream.read()))
        rows = [one.to_vector().to_numpy() for one in vectors if one.referenced_data_file == target]
        if len(rows) != 1:
            raise DataError(
                f"{self._snapshot}: {path} holds {len(rows)} deletion vectors of {target!r} in place of one"
            )
        self._vectors[target].append((entry.sequence_number or 0, rows[0].astype(np.int64)))

    def _add_positions(self, entry: Any) -> None:
        table = self._read(entry.data_file.file_path, ["file_path", "pos"])
        paths = table.column("file_path").combine_chunks().dictionary_encode()
        codes, rows = paths.indices.to_numpy(), table.column("pos").to_numpy()
        for code, path in enumerate(paths.dictionary.to_pylist()):
            self._positions[path].append((entry.sequence_number or 0, rows[codes == code].astype(np.int64)))

    def _applies(self, delete: Any, data: Any) -> bool:
        """Whether an equality delete applies to a data file.

        It applies to older files of the same partition.
        """
        if (delete.sequence_number or 0) <= (data.sequence_number or 0):
            return False
        spec = self._table.specs()[delete.data_file.spec_id or 0]
        if all(str(one.transform) == "void" for one in spec.fields):  # unpartitioned: version 1 removes no field
            return True
        # As text, in which NaNs are equal, as they are where Java compares partitions.
        places = [(one.data_file.spec_id or 0, repr(list(one.data_file.partition))) for one in (delete, data)]
        return places[0] == places[1]

    def _equal(self, delete: Any, data: Any) -> Positions:
        """The rows of a data file that equal a delete file's row in all its columns.

        Nulls equal nulls.
        """
        pyarrow = load_pyarrow()
        codes: Positions | None = None
        ids = tuple(delete.data_file.equality_ids)
        deleted = self._columns(delete.data_file.file_path, ids, is_whole=True)
        stored = self._columns(data.data_file.file_path, ids)
        for one, other in zip(deleted, stored, strict=True):
            values = pyarrow.chunked_array([*one.chunks, *other.chunks], one.type).combine_chunks()
            indices = values.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
            pairs = indices if codes is None else codes * (int(indices.max(initial=0)) + 1) + indices
            codes = np.unique(pairs, return_inverse=True)[1].astype(np.int64)  # small, so that products stay so
        assert codes is not None
        num_deleted = len(deleted[0])
        return np.flatnonzero(np.isin(codes[num_deleted:], codes[:num_deleted])).astype(np.int64)

    def _columns(self, url: str, ids: tuple[int, ...], *, is_whole: bool = False) -> list[Any]:
        """Columns of a file, which is read once: see :meth:`_read_columns`."""
        if (url, ids) not in self._known:
            self._known[url, ids] = self._read_columns(url, ids, is_whole=is_whole)
        return self._known[url, ids]

    def _read_columns(self, url: str, ids: tuple[int, ...], *, is_whole: bool) -> list[Any]:
        """Columns by field id, as ``pyarrow.ChunkedArray`` in the newest types.

        Args:
            url: the file.
            ids: the fields, which may be inside of structs.
            is_whole: the file must hold all of them; else those that are missing are nulls.
        """
        parquet = load_pyarrow("pyarrow.parquet")
        with as_filesystem(self._places.filesystem).open_input_file(self._places.inside(url)) as stream:
            file = parquet.ParquetFile(stream)
            stored = file.schema_arrow
            by_id = _paths(stored)
            if not by_id:
                raise DataError(f"{self._snapshot}: {url} has no field ids, which its equality deletes need")
            names = {stored.names[by_id[number][0]] for number in ids if number in by_id}
            table = file.read(columns=sorted(names))
            num_rows = file.metadata.num_rows
        columns = []
        for number in ids:
            field = self._field(number)
            wanted = _stored_type(self._arrow_type(field))
            if number in by_id:
                first, *inner = by_id[number]
                columns.append(as_type(_plain(table.column(stored.names[first]), inner), wanted, field.name, url))
                continue
            if is_whole:
                raise DataError(f"{self._snapshot}: {url} deletes rows by {field.name!r}, which it does not hold")
            if field.initial_default is not None or number in self._identities:
                raise DataError(
                    f"{self._snapshot} has equality deletes on {field.name!r}, which {url} does not hold: read it with "
                    "Spark, and give the DataFrame to fit() or materialize()"
                )
            columns.append(load_pyarrow().chunked_array([load_pyarrow().nulls(num_rows, wanted)]))
        return columns

    @functools.cached_property
    def _identities(self) -> set[int]:
        """Ids of the fields that are partition columns, so that files need not hold them."""
        specs = self._table.specs().values()
        return {one.source_id for spec in specs for one in spec.fields if str(one.transform) == "identity"}

    def _field(self, number: int) -> Any:
        """The newest field with an id; columns that were dropped have one too."""
        for _, schema in sorted(self._table.schemas().items(), reverse=True):
            if number in schema.field_ids:
                return schema.find_field(number)
        raise DataError(f"{self._snapshot} has equality deletes on the unknown field {number}")

    @staticmethod
    def _arrow_type(field: Any) -> Any:
        module = load_extra("pyiceberg.io.pyarrow", "iceberg", "to read Iceberg tables")
        return module.schema_to_pyarrow(field.field_type)

    def _read(self, url: str, names: Sequence[str]) -> Any:
        """Columns of a Parquet file."""
        with as_filesystem(self._places.filesystem).open_input_file(self._places.inside(url)) as stream:
            return load_pyarrow("pyarrow.parquet").read_table(stream, columns=list(names))


def _paths(fields: Any, above: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
    """Id -> the place, from the outside in, of each field, inside of structs too."""
    is_struct = load_pyarrow("pyarrow.types").is_struct
    found = {}
    for place, one in enumerate(fields):
        if FIELD_ID in (one.metadata or {}):
            found[int(one.metadata[FIELD_ID])] = (*above, place)
        if is_struct(one.type):
            found |= _paths(one.type, (*above, place))
    return found


def _plain(column: Any, inner: Sequence[int]) -> Any:
    """A field inside of a column's structs; null where one of these is null.

    It has neither extension types nor dictionaries.
    """
    pyarrow = load_pyarrow()
    if inner:
        column = load_pyarrow("pyarrow.compute").struct_field(column, list(inner))
    if isinstance(column.type, pyarrow.BaseExtensionType):  # such as UUIDs, of which Arrow computes nothing
        column = pyarrow.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column.cast(column.type.value_type) if pyarrow.types.is_dictionary(column.type) else column


def _stored_type(arrow_type: Any) -> Any:
    """The type that stores the values of an extension type; any other type itself."""
    return arrow_type.storage_type if isinstance(arrow_type, load_pyarrow().BaseExtensionType) else arrow_type
