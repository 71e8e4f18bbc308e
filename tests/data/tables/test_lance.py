"""Lance tables are read exactly: the live rows of one version, or a refusal that names what is not supported."""

from __future__ import annotations

import datetime as dt
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from table_rows import expected, rows_read

from hvd_cluster.data import ParquetReader, materialize, open_table
from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.tables import lance as lance_tables
from hvd_cluster.errors import DataError


def numbers(begin: int, stop: int, **columns: Any) -> pa.Table:
    ids = np.arange(begin, stop)
    return pa.table({"id": ids, "x": ids * 0.5, **columns})


def write(path: Path, table: pa.Table, **options: Any) -> Any:
    return lance.write_dataset(table, str(path), **options)


def ids(table: Any, **options: Any) -> list[int]:
    return sorted(int(row[0]) for row in rows_read(table, ["id"], **options).elements())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance_tables, "_PIECE_ROWS", 16)


@pytest.mark.usefixtures("small_pieces")
def test_deleted_and_updated_rows(tmp_path: Path) -> None:
    table = write(tmp_path / "t", numbers(0, 200), max_rows_per_file=60)
    table.delete("id % 3 = 0")
    assert ids(open_table(tmp_path / "t")) == [i for i in range(200) if i % 3]
    table.update({"x": "-1.0"}, where="id < 50")
    rows = [{"id": i, "x": -1.0 if i < 50 else i * 0.5} for i in range(200) if i % 3]
    assert rows_read(open_table(tmp_path / "t"), ["id", "x"], size=3) == expected(rows, ["id", "x"])
    assert ids(open_table(tmp_path / "t", version=1)) == [*range(200)]
    assert ids(table, filters=[("x", "==", -1.0), ("id", ">", 10)]) == [i for i in range(11, 50) if i % 3]


def test_an_earlier_version_is_read_by_number_tag_and_time(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 10)).tags.create("golden", 1)
    time.sleep(0.05)
    between = dt.datetime.now(dt.timezone.utc)
    time.sleep(0.05)
    table = write(tmp_path / "t", numbers(10, 20), mode="append")
    for options in ({"version": 1}, {"version": "1"}, {"version": "golden"}, {"as_of": between}):
        assert ids(open_table(tmp_path / "t", **options)) == [*range(10)]
        assert ids(open_table(table, **options)) == [*range(10)]
    assert ids(table.checkout_version(1)) == [*range(10)]
    assert ids(tmp_path / "t", size=1) == [*range(20)]
    with pytest.raises(DataError, match="version 9"):
        open_table(tmp_path / "t", version=9)


@pytest.mark.parametrize("name", ["3", "20240501"])
def test_a_tag_of_digits_comes_before_the_number(tmp_path: Path, name: str) -> None:
    for first in range(3):
        table = write(tmp_path / "t", numbers(first, first + 1), mode="append" if first else "create")
    table.tags.create(name, 1)
    for source in (tmp_path / "t", table):
        assert ids(open_table(source, version=name)) == [0]
        assert ids(open_table(source, version=3)) == [0, 1, 2]
        assert ids(open_table(source, version="2")) == [0, 1]


def test_versions_of_branches_are_read_through_objects_tags_and_urls(tmp_path: Path) -> None:
    root = write(tmp_path / "t", numbers(0, 10))
    branch = root.create_branch("dev/b")
    time.sleep(0.05)
    between = dt.datetime.now(dt.timezone.utc)
    branch.insert(numbers(100, 105))
    branch.delete("id = 3")
    for _ in range(2):
        root = write(tmp_path / "t", numbers(10, 12), mode="append")
    root.tags.create("tagged", ("dev/b", 2))
    first, second = [*range(10)], [*range(10), *range(100, 105)]
    newest = [i for i in second if i != 3]
    loaded = root.checkout_version(("dev/b", None))
    assert ids(loaded) == ids(branch) == ids(pickle.loads(pickle.dumps(open_table(loaded)))) == newest
    assert ids(branch.checkout_version(("main", None))) == ids(root) == [*first, 10, 10, 11, 11]
    for table in (loaded, branch):
        assert ids(open_table(table, version=1)) == ids(open_table(table, as_of=between)) == first
        assert ids(open_table(table, version=2)) == second
        with pytest.raises(DataError, match="version 9"):
            open_table(table, version=9)
        with pytest.raises(DataError, match="its first version is newer"):
            open_table(table, as_of="2020-01-01")
    for source in (tmp_path / "t", root, loaded):
        assert ids(open_table(source, version="tagged")) == second
    assert ids(open_table(tmp_path / "t" / "tree" / "dev" / "b")) == newest
    shutil.rmtree(tmp_path / "t" / "tree")
    with pytest.raises(DataError, match="version 3: it was removed, or its branch was"):
        open_table(loaded)


def test_renamed_added_and_dropped_columns(tmp_path: Path) -> None:
    table = write(tmp_path / "t", numbers(0, 10))
    table.alter_columns({"path": "id", "name": "key"})
    table.add_columns({"double": "key * 2"})
    table.drop_columns(["x"])
    rows = [{"key": i, "double": 2 * i} for i in range(10)]
    assert open_table(tmp_path / "t").arrow_schema.names == ["key", "double"]
    assert rows_read(open_table(tmp_path / "t"), ["key", "double"]) == expected(rows, ["key", "double"])


def test_vectors_and_text_of_compacted_tables(tmp_path: Path) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(40, dtype=np.float32)), 4)
    write(tmp_path / "t", pa.table({"id": range(10), "v": vectors, "text": [str(i) for i in range(10)]}))
    table = lance.dataset(str(tmp_path / "t"))
    table.delete("id = 3")
    table.optimize.compact_files()
    dataset = materialize(str(tmp_path / "t"), tmp_path / "store", columns=["id", "v"])
    (batch,) = ParquetReader(dataset, batch_size=9, shuffle=False)
    assert batch["v"].shape == (9, 4)
    assert batch["v"][:, 0].tolist() == [4.0 * i for i in range(10) if i != 3]
    (batch,) = ParquetReader(table, ["text"], batch_size=9, decode={"text": lambda text: np.int64(text)})
    assert sorted(batch["text"].tolist()) == [i for i in range(10) if i != 3]


def test_a_version_that_was_cleaned_up_says_so(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 10))
    old = open_table(tmp_path / "t")
    reader = ParquetReader(old, batch_size=2)
    table = write(tmp_path / "t", numbers(10, 20), mode="overwrite")
    table.cleanup_old_versions(older_than=dt.timedelta(0), delete_unverified=True)
    with pytest.raises(DataError, match=r"cannot read version 1 of the Lance table.*\.lance"):
        list(reader)
    with pytest.raises(DataError, match="version 1"):
        open_table(tmp_path / "t", version=1)


def test_a_position_belongs_to_its_version_and_resumes(tmp_path: Path) -> None:
    table = write(tmp_path / "t", numbers(0, 100), max_rows_per_file=30)
    reader = ParquetReader(table, batch_size=4)
    batches = iter(reader)
    for _ in range(5):
        next(batches)
    state = reader.state_dict()
    write(tmp_path / "t", numbers(100, 104), mode="append")
    rest = [batch["id"].tolist() for batch in batches]
    with pytest.raises(DataError, match=r"version 1.*version 2"):
        ParquetReader(tmp_path / "t", batch_size=4).load_state_dict(state)
    again = ParquetReader(open_table(tmp_path / "t", version=1), batch_size=4)
    again.load_state_dict(state)
    assert [batch["id"].tolist() for batch in again] == rest


def test_blobs_are_refused_when_they_are_read(tmp_path: Path) -> None:
    field = pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    write(tmp_path / "t", pa.table([[1, 2], [b"a", b"b"]], schema=pa.schema([("id", pa.int64()), field])))
    assert ids(open_table(tmp_path / "t")) == [1, 2]
    with pytest.raises(DataError, match="blobs in 'b'"):
        ParquetReader(tmp_path / "t", batch_size=1, decode={"b": len})


@pytest.mark.parametrize("depth", ["struct", "struct of struct", "list of struct", "list"])
def test_blobs_inside_of_structs_and_lists_are_refused_when_they_are_read(tmp_path: Path, depth: str) -> None:
    field = pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    values = pa.array([b"a", b"b"], pa.large_binary())
    nested: pa.Array = pa.StructArray.from_arrays([values], fields=[field])
    if depth == "struct of struct":
        nested = pa.StructArray.from_arrays([nested], names=["inner"])
    elif depth.startswith("list"):
        kind, values = (field, values) if depth == "list" else (pa.field("s", nested.type), nested)
        nested = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), values, type=pa.list_(kind))
    write(tmp_path / "t", pa.table({"id": [1, 2], "s": nested}))
    assert ids(open_table(tmp_path / "t")) == [1, 2]
    with pytest.raises(DataError, match="blobs in 's'"):
        ParquetReader(tmp_path / "t", batch_size=1, decode={"s": len})


def test_a_cache_keeps_no_rows_of_a_table_that_was_made_again(tmp_path: Path) -> None:
    cache = MemoryCache(1 << 20)
    for first in (0, 10):
        lance.write_dataset(pa.table({"id": [first, first + 1]}), tmp_path / "t.lance")
        (batch,) = ParquetReader(tmp_path / "t.lance", batch_size=2, shuffle=False, cache=cache)
        assert batch["id"].tolist() == [first, first + 1]
        shutil.rmtree(tmp_path / "t.lance")
