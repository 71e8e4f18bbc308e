"""Arrow files on the local disk: the same batches as through Parquet, byte for byte."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cluster.data.columns.vectors import vector_type
from hvd_cluster.data.local_arrow import write_arrow
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError


def table_of(rows: int) -> pa.Table:
    """Every kind of column."""
    ids = np.arange(rows)
    sparse = [{"type": 0, "size": 4, "indices": [i % 4], "values": [float(i)]} for i in ids]
    dense = [{"type": 1, "size": None, "indices": None, "values": [float(i), 0.5]} for i in ids]
    return pa.table(
        {
            "id": ids,
            "x": ids / 3,
            "flag": pa.array(ids % 3 == 0),
            "when": pa.array(ids * 1000, pa.timestamp("us")),
            "list": [[int(i), int(i) + 1] for i in ids],
            "dense": pa.array(dense, vector_type()),
            "sparse": pa.array(sparse, vector_type()),
            "text": [f"row {i}" for i in ids],
            "held": ids % 7 == 0,
        }
    )


COLUMNS = ["id", "x", "flag", "when", "list", "dense", "sparse", "text"]


def bytes_of(reader: ParquetReader) -> list[dict[str, bytes]]:
    return [{name: tensor.numpy().tobytes() for name, tensor in batch.items()} for batch in reader]


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 200),
    batch_rows=st.integers(1, 60),
    group_rows=st.integers(1, 80),
    window_bytes=st.sampled_from([None, 400, 4000]),
    shuffle=st.booleans(),
    validation=st.sampled_from([None, "held"]),
    size=st.integers(1, 3),
    float32=st.booleans(),
)
def test_batches_are_those_of_parquet_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    batch_rows: int,
    group_rows: int,
    window_bytes: int | None,
    shuffle: bool,
    validation: str | None,
    size: int,
    float32: bool,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    table = table_of(rows)
    # What `materialize` makes of so many rows.
    groups = max(256, -(-rows // 10))
    local = write_arrow(
        table.to_batches(max_chunksize=batch_rows),
        folder / "local",
        columns=COLUMNS,
        validation=validation,
        group_rows=groups,
        float32=float32,
    )
    if validation and rows == 1:
        assert (local.train.rows, local.validation.rows if local.validation else 0) == (0, 1)
        local.remove()
        return
    store = Store.create(folder / "store")
    stored = materialize(table, store, columns=COLUMNS, validation=validation, float32=float32)
    assert local.schema == stored.schema
    options: Any = {
        "batch_size": 8,
        "window_bytes": window_bytes,
        "shuffle": shuffle,
        "remainder": "partial",
        "decode": {"text": lambda text: int(text[4:])},
    }
    for rank in range(size):
        one = ParquetReader(local, rank=rank, size=size, **options)
        other = ParquetReader(stored, rank=rank, size=size, **options)
        assert bytes_of(one) == bytes_of(other)
    local.remove()
    stored.remove()
    assert list((folder / "local").iterdir()) == []


def test_row_groups_are_as_wished_and_a_pickled_data_set_reads_them(tmp_path: Path) -> None:
    data = write_arrow(table_of(100).to_batches(max_chunksize=7), tmp_path, columns=["id", "x"], group_rows=30, lanes=2)
    assert [group.rows for group in data.train.row_groups] == [30, 30, 30, 10]
    again = pickle.loads(pickle.dumps(data))
    seen = [
        row
        for rank in range(2)
        for batch in ParquetReader(again, batch_size=5, rank=rank, size=2, window_bytes=500)
        for row in batch["id"].tolist()
    ]
    assert sorted(seen) == list(range(100))
    data.remove()
    data.remove()
    assert list(tmp_path.iterdir()) == []


def test_batches_may_be_changed_in_place(tmp_path: Path) -> None:
    data = write_arrow(table_of(50).to_batches(), tmp_path, columns=["id", "list"])
    reader = ParquetReader(data, batch_size=10, shuffle=False)
    for batch in reader:
        batch["id"].fill_(-1)
        batch["list"].fill_(-1)
    assert [row for batch in reader for row in batch["id"].tolist()] == list(range(50))


def test_rows_go_to_the_disk_as_they_come(tmp_path: Path) -> None:
    """The iterator sees the file grow: nothing waits for the end."""
    sizes: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(5):
            sizes.append(sum(file.stat().st_size for file in tmp_path.rglob("*.arrow")))
            yield pa.RecordBatch.from_pydict({"x": np.zeros(10_000)})

    data = write_arrow(batches(), tmp_path, group_rows=10_000)
    assert sizes == sorted(sizes)
    assert sizes[-1] >= 3 * 80_000
    data.remove()


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (pa.table({"x": pa.array([], pa.int64())}), {}, "the data has no rows"),
        (pa.table({"x": [1, None]}), {}, "'x' holds 1 null"),
        (pa.table({"x": [[1], [1, 2]]}), {}, "different lengths, 1 and 2"),
        (pa.table({"x": [1.0, 1e300]}), {"float32": True}, "'x' holds values beyond the range of float32"),
        (pa.table({"x": [1]}), {"columns": ["y"]}, "there is no column 'y'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_and_leaves_nothing(
    tmp_path: Path, table: pa.Table, options: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write_arrow(table.to_batches(), tmp_path / "a", **options)
    assert not list((tmp_path / "a").rglob("*")) if (tmp_path / "a").exists() else True


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written"):
        write_arrow(table_of(3).to_batches(), tmp_path / "file", columns=["id"])
    with pytest.raises(DataError, match="is not on this machine's disk"):
        write_arrow(table_of(3).to_batches(), "memory://x/y", columns=["id"])
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208
