"""Values in the names of folders, as Hive and Spark write them.

For example ``year=2024/country=de/part-0.parquet``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import unquote

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.errors import DataError

#: What Hive calls the folder of rows whose value is null or empty.
_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"[+-]?\d{1,18}")

#: Column -> value of one file, in the order of its folders.
Partition = tuple[tuple[str, Any], ...]


def partitions(paths: Sequence[str], texts: Collection[str] = ()) -> list[Partition]:
    """The columns that folders name.

    Args:
        paths: files, relative to the data set's folder.
        texts: columns that are text even where all values are integers ("month=01").

    Returns:
        For each path its columns and values: integers where all values of the column over all paths are, else text;
        None for null. Empty tuples where no folder is called ``key=value``.

    Raises:
        DataError: files differ in the columns that their folders name.
    """
    found = [_texts(path) for path in paths]
    names = list(found[0]) if found else []
    for path, values in zip(paths, found, strict=True):
        if list(values) != names:
            raise DataError(
                f"the folders of {path!r} name the columns {list(values)}, but those of {paths[0]!r} {names}: all "
                "files of a data set lie below the same key=value folders"
            )
    whole = {
        name
        for name in names
        if name not in texts and all(values[name] is None or _INTEGER.fullmatch(values[name]) for values in found)
    }
    return [
        tuple((name, int(value) if value and name in whole else value) for name, value in values.items())
        for values in found
    ]


def folders_above(file: str, below: str) -> str:
    """The ``key=value`` folders that a path lies in, each with its "/".

    Each is directly below the one before.

    Args:
        file: a file inside the path, or the path itself.
        below: the file, relative to the path; "" where it is the path.
    """
    parts = (file[: len(file) - len(below)] if below else file.rpartition("/")[0]).strip("/").split("/")
    named = list(itertools.takewhile(lambda part: "=" in part, reversed(parts)))
    return "".join(f"{part}/" for part in reversed(named))


def arrow_fields(partitions: Sequence[Partition]) -> list[Any]:
    """The ``pyarrow.Field`` of each column that folders name: int64 or string."""
    pyarrow = load_pyarrow()
    fields = []
    for index, (name, _) in enumerate(partitions[0] if partitions else ()):
        whole = any(isinstance(partition[index][1], int) for partition in partitions)
        fields.append(pyarrow.field(name, pyarrow.int64() if whole else pyarrow.string()))
    return fields


def _texts(path: str) -> dict[str, Any]:
    """Column -> text of its value; None for null."""
    pairs = [part.split("=", 1) for part in path.split("/")[:-1] if "=" in part]
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}
