"""A data set's description as a file beside its data: another process can use it without looking at the data."""

from __future__ import annotations

import json
from typing import Any

from hvd_cluster.data.dataset import Dataset, RowGroup, Split
from hvd_cluster.data.schema import Column, Kind, Schema
from hvd_cluster.data.store import Store

#: Name of the file, in the folder of the training part.
MANIFEST = "_dataset.json"
_VERSION = 1


def save(dataset: Dataset, folder: str) -> None:
    """Write a data set's description into a folder of its store."""
    validation = dataset.validation
    content = {
        "version": _VERSION,
        "columns": [[c.name, c.kind.value, c.dtype, c.shape, c.unit] for c in dataset.schema],
        "train": _split_values(dataset.train),
        "validation": None if validation is None else _split_values(validation),
    }
    dataset.store.write(f"{folder}/{MANIFEST}", json.dumps(content))


def load(store: Store, folder: str) -> Dataset | None:
    """The data set that a folder describes; None where there is no such description, or data is missing."""
    try:
        content = json.loads(store.read(f"{folder}/{MANIFEST}"))
    except FileNotFoundError:
        return None
    if content.get("version") != _VERSION:
        return None
    columns = tuple(
        Column(name, Kind(kind), dtype, tuple(shape), unit) for name, kind, dtype, shape, unit in content["columns"]
    )
    validation = content["validation"]
    dataset = Dataset(
        store, Schema(columns), _split(content["train"]), None if validation is None else _split(validation)
    )
    splits = [dataset.train] if dataset.validation is None else [dataset.train, dataset.validation]
    paths = {group.path for split in splits for group in split.row_groups}
    there = {path for parent in {path.rsplit("/", 1)[0] for path in paths} for path in store.list(parent)}
    return dataset if paths <= there else None


def _split_values(split: Split) -> dict[str, Any]:
    groups = [[group.path, group.index, group.rows, group.size_bytes] for group in split.row_groups]
    return {"rows": split.rows, "lanes": split.lanes, "row_groups": groups}


def _split(values: dict[str, Any]) -> Split:
    groups = tuple(RowGroup(path, index, rows, size_bytes=size) for path, index, rows, size in values["row_groups"])
    return Split(groups, values["rows"], values["lanes"])
