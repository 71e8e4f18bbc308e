"""Names for data by what it holds: the same rows, asked for in the same way, have the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.files.retry import retried
from hvd_cluster.data.optional import load_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_cluster.data.store import Store

#: Part of every name: a change of what is written makes new names.
_FORMAT = "hvd-cluster 1"


def of_table(table: pa.Table, options: Mapping[str, Any]) -> str:
    """The name of an Arrow table's columns, written with these options: 32 hexadecimal digits.

    A table that is cut into other chunks, or has other values behind its nulls, may have another name.

    Args:
        table: the columns that are written.
        options: plain values that decide what is written.
    """
    digest = _digest(options)
    pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
    with pyarrow.PythonFile(_Hashing(digest), mode="w") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return str(digest.hexdigest())


def of_files(store: Store, paths: Sequence[str], options: Mapping[str, Any]) -> str:
    """The name of files as they are now, by their paths, sizes and times of change; see :func:`of_table`."""
    digest = _digest(options)
    for info in retried(lambda: store.fs.get_file_info(list(paths)), store.fs, "looking at the files to name"):
        digest.update(f"{info.path}\0{info.size}\0{info.mtime_ns}\0".encode())
    return str(digest.hexdigest())


def of_text(text: str, options: Mapping[str, Any]) -> str:
    """The name of what a text describes; see :func:`of_table`."""
    digest = _digest(options)
    digest.update(text.encode())
    return str(digest.hexdigest())


def _digest(options: Mapping[str, Any]) -> Any:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([_FORMAT, options], sort_keys=True).encode())
    return digest


class _Hashing:
    """A file that only counts into a digest what is written to it."""

    closed = False

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(memoryview(data).cast("B")) if not isinstance(data, bytes) else len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.closed = True
