"""Lance tables: lance itself reads the fragments of a version, in pieces."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.optional import load_extra, load_pyarrow
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.tables import object_store
from hvd_cluster.data.tables.table_source import FragmentReader, Snapshot, TableSource
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are read in one call: a fragment may have a million.
_PIECE_ROWS = 1 << 16
#: Rows that are read to estimate the size of the others.
_SAMPLE_ROWS = 256
_BLOB = b"lance-encoding:blob"


def at(
    url: str, version: int | str | None, moment: dt.datetime | None, storage_options: Mapping[str, Any] | None
) -> LanceTable:
    """The table in a folder; a version may also be a tag.

    Args:
        url: its path or URL.
        version: None for the newest.
        moment: the version at this time.
        storage_options: arguments for fsspec's filesystem, or options of lance.
    """
    options = object_store.options_of(url, storage_options)
    try:
        number = _number(version, lambda: _library().dataset(url, storage_options=options))
        dataset = _library().dataset(url, version=number, asof=_local(moment), storage_options=options)
    except (OSError, ValueError) as error:
        raise _unopened(url, version, moment, error) from error
    return LanceTable(_in_its_branch(dataset, options) if isinstance(number, str) else dataset, options)


def of_object(dataset: Any, version: int | str | None, moment: dt.datetime | None) -> LanceTable:
    """What a ``lance.LanceDataset`` has loaded, or another version of its branch."""
    options = object_store.options_of(dataset.uri, dataset.initial_storage_options)
    try:
        number = _number(version, lambda: dataset) if moment is None else _version_at(dataset, moment)
        loaded = dataset if number is None else dataset.checkout_version(number)
    except (OSError, ValueError) as error:
        raise _unopened(dataset.uri, version, moment, error) from error
    return LanceTable(_in_its_branch(loaded, options), options)


def _number(version: int | str | None, dataset: Callable[[], Any]) -> int | str | None:
    """The number of a version, or its tag; digits are a tag if the data set has it."""
    if isinstance(version, str) and version.isdecimal() and version not in dataset().tags.list():
        return int(version)
    return version


def _local(moment: dt.datetime | None) -> dt.datetime | None:
    """A time as Lance takes and returns it."""
    return None if moment is None else moment.astimezone().replace(tzinfo=None)


def _version_at(dataset: Any, moment: dt.datetime) -> int:
    """The number of the version of a data set's branch at a time."""
    local = _local(moment)
    numbers: list[int] = [one["version"] for one in dataset.versions() if one["timestamp"] < local]
    if not numbers:
        raise ValueError("its first version is newer")
    return max(numbers)


def _unopened(url: str, version: int | str | None, moment: dt.datetime | None, why: object) -> DataError:
    which = "" if version is None and moment is None else f" as of {moment or f'version {version}'}"
    return DataError(f"cannot open the Lance table in {url!r}{which}: {why}")


def _in_its_branch(dataset: Any, options: Mapping[str, str] | None) -> Any:
    """The same version, opened by the URL of its branch.

    Then ``uri`` and ``version`` identify it. A tag and ``checkout_version`` open versions of any branch, but leave
    ``uri`` as it was, and each branch counts its versions for itself.
    """
    wanted = _content(dataset)
    for url in _urls_of_branches(dataset):
        with contextlib.suppress(OSError, ValueError):  # the branch has no version of this number
            found = _library().dataset(url, version=dataset.version, storage_options=options)
            if _content(found) == wanted:
                return found
    raise _unopened(dataset.uri, dataset.version, None, "it was removed, or its branch was: load another version")


def _urls_of_branches(dataset: Any) -> Iterator[str]:
    """The possible URLs of a data set's branch: its own, the table's, all branches'."""
    yield dataset.uri
    names = list(dataset.branches.list())
    root = dataset.uri.rstrip("/")
    root = next((root.removesuffix(f"/tree/{name}") for name in names if root.endswith(f"/tree/{name}")), root)
    yield from (root, *(f"{root}/tree/{name}" for name in names))


def _content(dataset: Any) -> tuple[Any, list[list[Any]]]:
    """The stored columns, and the files of each fragment."""
    return dataset.lance_schema.to_pyarrow(), [_files(one) for one in dataset.get_fragments()]


def _library() -> Any:
    return load_extra("lance", "lance", "to read Lance tables")


class LanceFragments(FragmentReader):
    """Reads pieces of a version's fragments. Each process opens the table for itself.

    Args:
        url: the table.
        version: number of the version.
        options: of lance's object store.
    """

    #: The threads of lance do not exist in a forked process, which would wait for them forever.
    can_fork = False

    def __init__(self, url: str, version: int, options: Mapping[str, str] | None) -> None:
        self._url, self._version, self._options = url, version, options
        self.types: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "fragments"}

    @functools.cached_property
    def fragments(self) -> dict[str, Any]:
        """Name -> ``lance.LanceFragment``."""
        dataset = _library().dataset(self._url, version=self._version, storage_options=self._options)
        return {f"fragment {one.fragment_id} of {self._url}": one for one in dataset.get_fragments()}

    def read(
        self, fragments: Sequence[RowGroup], names: Sequence[str], texts: Collection[str]
    ) -> tuple[pa.Table, list[int]]:
        try:
            tables = [
                self.fragments[one.path].to_table(
                    columns=list(names), offset=one.index * _PIECE_ROWS, limit=_PIECE_ROWS, use_scalar_index=False
                )
                for one in fragments
            ]
        except (OSError, ValueError) as error:
            if "not found" in str(error).lower():
                raise FileNotFoundError(str(error)) from error
            raise
        return load_pyarrow().concat_tables(tables), [table.num_rows for table in tables]

    def source(self, path: str) -> str:
        return f"lance {self._version} {path} {_files(self.fragments[path])}"


class LanceTable(TableSource):
    """A version of a Lance table.

    Args:
        dataset: the ``lance.LanceDataset``.
        options: of lance's object store.
    """

    def __init__(self, dataset: Any, options: Mapping[str, str] | None) -> None:
        fragments = [*dataset.get_fragments()]
        files = [_files(one) for one in fragments]
        self.snapshot: Snapshot = Snapshot(
            format="Lance",
            table=dataset.uri,
            version=str(dataset.version),
            # Lance has no id of a table; names of files are drawn at random.
            table_id=f"{zlib.crc32(repr(files).encode()):08x}",
        )
        self.name = str(self.snapshot)
        self.arrow_schema = dataset.schema
        self._reader = LanceFragments(dataset.uri, dataset.version, options)
        self.reader = self._reader

    def require(self, names: Sequence[str]) -> None:
        super().require(names)
        blobs = [name for name in names if _is_blob(self.arrow_schema.field(name))]
        if blobs:
            raise DataError(f"{self.name} holds blobs in {', '.join(map(repr, blobs))}, which are not supported")

    def fragments(self, names: Sequence[str], row_filter: RowFilter | None = None) -> tuple[RowGroup, ...]:
        groups: list[RowGroup] = []
        row_bytes: int | None = None
        for path, fragment in self._reader.fragments.items():
            rows = fragment.count_rows()
            if rows and names and row_bytes is None:
                sample = fragment.to_table(columns=list(names), limit=_SAMPLE_ROWS)
                row_bytes = -(-sample.nbytes // sample.num_rows)
            for index, begin in enumerate(range(0, rows, _PIECE_ROWS)):
                count = min(_PIECE_ROWS, rows - begin)
                groups.append(RowGroup(path, index, count, size_bytes=count * (row_bytes or 0)))
        return tuple(groups)


def _files(fragment: Any) -> list[Any]:
    """The files of a fragment, whose random names stay with their contents."""
    return [*(file.path for file in fragment.data_files()), fragment.deletion_file()]


def _is_blob(field: Any) -> bool:
    """Whether a column's values, or some inside of them, are kept elsewhere.

    Then lance returns their places.
    """
    kind = getattr(field.type, "storage_type", field.type)  # of an extension type
    return (
        _BLOB in (field.metadata or {})
        or getattr(field.type, "extension_name", "").startswith("lance.blob")
        or any(_is_blob(kind.field(index)) for index in range(kind.num_fields))
    )
