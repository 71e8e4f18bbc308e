"""The footers of Parquet files, and the memory that row groups take.

That is the memory once they are read.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from hvd_cluster.data.row_group import RowGroup

#: Memory that the footers which a reader keeps may take.
FOOTERS_BYTES = 32 * 1024 * 1024
#: A footer in memory beside its bytes in the file, and for each column of a row group; as measured.
_MEMORY_RATIO = 9
_CHUNK_BYTES = 1024


def memory_bytes(footer: Any) -> int:
    """About what a ``pyarrow.parquet.FileMetaData`` takes in memory."""
    return _MEMORY_RATIO * int(footer.serialized_size)


def estimated(groups: Iterable[RowGroup], num_columns: int) -> list[int]:
    """About what the footers of row groups' files take in memory, unseen."""
    numbers = Counter(path for path, _ in {(group.path, group.index) for group in groups})
    return [number * num_columns * _CHUNK_BYTES for number in numbers.values()]


def bound_bytes(footers: Iterable[int], num_threads: int) -> int:
    """A bound of the memory of footers while this many threads read.

    Those kept count, and one for each thread.
    """
    sizes = list(footers)
    largest = max(sizes, default=0)
    return min(sum(sizes), max(FOOTERS_BYTES, largest) + num_threads * largest)


class FooterCache:
    """Keeps the footers used last, within a bound of bytes; always the newest.

    Several threads may use it at once; a footer that several want is read by one of them.
    """

    def __init__(self, limit_bytes: int = FOOTERS_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._footers: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Lock] = {}
        #: About what they take in memory.
        self.held_bytes = 0

    def get(self, path: str, read: Callable[[], Any]) -> Any:
        """The footer of a file: the one that is kept, or what ``read()`` returns."""
        with self._lock:
            reading = self._reading.setdefault(path, threading.Lock())
        with reading:
            with self._lock:
                if path in self._footers:
                    self._footers.move_to_end(path)
                    return self._footers[path]
            footer = read()
            with self._lock:
                self._footers[path] = footer
                self.held_bytes += memory_bytes(footer)
                while self.held_bytes > self._limit_bytes and len(self._footers) > 1:
                    forgotten, oldest = self._footers.popitem(last=False)
                    self._reading.pop(forgotten, None)
                    self.held_bytes -= memory_bytes(oldest)
        return footer

    def __getstate__(self) -> dict[str, int]:
        """Footers are not pickled."""
        return {"limit_bytes": self._limit_bytes}

    def __setstate__(self, state: dict[str, int]) -> None:
        FooterCache.__init__(self, **state)


# The sizes in a footer are those of encoded pages: a column of few distinct values is stored as a dictionary and a few
# bits per row. Numbers have the width of their type in memory, whatever their encoding.
#: Bytes of an element in Arrow; a bool counts as the byte that it takes in a tensor.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_DECIMAL_BYTES = 16
#: Of an Arrow list's offset, and of a dictionary's index.
_INDEX_BYTES = 4


def row_group_bytes(footer: Any, index: int, leaves: Iterable[int]) -> int:
    """Bytes of a row group's Parquet columns, stored or as Arrow data.

    The larger counts; stored is before compression. Text inside of lists counts as it is stored, and so does text in
    Parquet's encoding DELTA_BYTE_ARRAY: what is equal in neighbours is not counted twice there.
    """
    group = footer.row_group(index)
    return sum(_leaf_bytes(footer.schema.column(leaf), group.column(leaf), group.num_rows) for leaf in leaves)


def _leaf_bytes(leaf: Any, chunk: Any, rows: int) -> int:
    values, stored = int(chunk.num_values), int(chunk.total_uncompressed_size)
    beside = -(-values // 8) if leaf.max_definition_level else 0
    if leaf.max_repetition_level:
        beside += _INDEX_BYTES * (rows + 1 + values * (leaf.max_repetition_level - 1))
    if leaf.logical_type.type == "DECIMAL":
        return max(stored, values * max(_DECIMAL_BYTES, int(leaf.length))) + beside
    if leaf.physical_type == "BYTE_ARRAY":
        return stored + values * _INDEX_BYTES + beside
    return max(stored, values * (_WIDTHS.get(leaf.physical_type) or int(leaf.length))) + beside
