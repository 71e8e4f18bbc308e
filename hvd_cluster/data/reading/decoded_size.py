"""What a row group of Parquet takes in memory once it has been read, as its footer tells.

The sizes that a footer states are those of encoded pages: a column of few distinct values is stored as a dictionary and
a few bits a row. Numbers have the width of their type whatever their encoding. Text and bytes that are read as Arrow
dictionaries stay as small as they are stored; see :class:`hvd_cluster.data.reading.row_groups.RowGroupTables`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Bytes of an element in Arrow; a bool counts as the byte that it takes in a tensor.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_DECIMAL_BYTES = 16
#: Of an Arrow list's offset, and of a dictionary's index.
_INDEX_BYTES = 4


def row_group_bytes(footer: Any, index: int, leaves: Iterable[int]) -> int:
    """Bytes of a row group's Parquet columns, as stored before compression or as Arrow data, whichever is larger.

    Text inside of lists counts as it is stored, and so does text in Parquet's encoding DELTA_BYTE_ARRAY: what is equal
    in neighbours is not counted twice there.

    Args:
        footer: a ``pyarrow.parquet.FileMetaData``.
        index: the row group.
        leaves: indices of the columns.
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
