"""pandas, Arrow and Parquet in place: what is written, what is checked, and what is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data.columns.vectors import vector_type
from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.local_arrow import write_arrow
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.schema import UNKNOWN, Column, ColumnKind
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError

ROWS = 400


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def frame() -> pd.DataFrame:
    ids = np.arange(ROWS)
    return pd.DataFrame(
        {
            "id": ids,
            "list": [[float(i), 1.0] for i in ids],
            "vector": [np.array([i, 2.0], dtype=np.float32) for i in ids],
            "image": [np.full((2, 3), i, dtype=np.uint8) for i in ids],
            "tensor": [torch.full((2,), float(i)) for i in ids],
            "flag": ids % 2 == 0,
            "nullable": pd.array(ids, dtype="Int32"),
            "kind": pd.Categorical.from_codes(ids % 3, [10, 20, 30]),
            "name": [f"name {i}" for i in ids],
            "held": (ids % 5 == 0).astype(np.int8),
        }
    )


def everything(dataset: Dataset, split: Split | None) -> dict[str, torch.Tensor]:
    """All rows of a split, sorted by id."""
    assert split is not None
    reader = ParquetReader(split, dataset.schema, dataset.store, batch_size=64, remainder="partial")
    batches = list(reader.epoch(0))
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in dataset.schema.names}
    order = whole["id"].argsort()
    return {name: tensor[order] for name, tensor in whole.items()}


def order_of(dataset: Dataset, batch_size: int, rank: int = 0, size: int = 1) -> list[list[int]]:
    reader = ParquetReader(dataset.train, dataset.schema, dataset.store, batch_size=batch_size, rank=rank, size=size)
    return [batch["id"].tolist() for batch in reader.epoch(0)]


def test_every_kind_of_pandas_column_arrives_as_the_same_numbers(frame: pd.DataFrame, store: Store) -> None:
    columns = ["id", "list", "vector", "image", "tensor", "flag", "nullable", "kind"]
    dataset = materialize(frame, store, columns=columns, num_proc=2)
    rows = everything(dataset, dataset.train)
    ids = torch.arange(ROWS)
    assert torch.equal(rows["list"], torch.stack([ids, torch.ones(ROWS)], 1).double())
    assert torch.equal(rows["vector"], torch.stack([ids.float(), torch.full((ROWS,), 2.0)], 1))
    assert torch.equal(rows["image"], ids.to(torch.uint8).reshape(-1, 1, 1).expand(-1, 2, 3))
    assert torch.equal(rows["tensor"], ids.float().reshape(-1, 1).expand(-1, 2))
    assert torch.equal(rows["flag"], ids % 2 == 0)
    assert torch.equal(rows["nullable"], ids.int())
    assert torch.equal(rows["kind"], (ids % 3 + 1) * 10)
    assert dataset.schema["image"] == Column("image", ColumnKind.LIST, "uint8", (2, 3))
    assert dataset.schema["vector"] == Column("vector", ColumnKind.LIST, "float32", (2,))


def test_sparse_pandas_columns_are_columns_of_numbers(store: Store) -> None:
    frame = pd.get_dummies(pd.Series(list("abca")), sparse=True).assign(x=pd.arrays.SparseArray([0.0, 0.0, 1.5, 0.0]))
    dataset = materialize(frame, store, columns=["a", "x"])
    reader = ParquetReader(dataset.train, dataset.schema, dataset.store, batch_size=4, shuffle=False)
    batch = next(reader.epoch(0))
    assert batch["a"].tolist() == [True, False, False, True]
    assert batch["x"].tolist() == [0.0, 0.0, 1.5, 0.0]


def test_spark_vectors_in_pandas_are_columns_too(store: Store) -> None:
    linalg = pytest.importorskip("pyspark.ml.linalg", reason="pyspark is not installed")
    frame = pd.DataFrame({"id": [0, 1], "v": [linalg.Vectors.dense([1.0, 2.0]), linalg.Vectors.sparse(2, {1: 3.0})]})
    dataset = materialize(frame, store, columns=["id", "v"])
    assert everything(dataset, dataset.train)["v"].tolist() == [[1.0, 2.0], [0.0, 3.0]]


@pytest.mark.parametrize("first_sparse", [False, True])
def test_arrow_vectors_are_stored_dense_or_sparse_and_read_alike(store: Store, first_sparse: bool) -> None:
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 0.0, 2.0]}
    sparse = {"type": 0, "size": 3, "indices": [1], "values": [5.0]}
    vectors = [sparse, dense] if first_sparse else [dense, sparse]
    table = pa.table({"id": range(100), "v": pa.array(vectors * 50, vector_type())})
    if not first_sparse:  # the first batch decides: let it be dense only
        table = pa.table({"id": range(100), "v": pa.chunked_array([[dense] * 50, [sparse] * 50], vector_type())})
    dataset = materialize(table, store, columns=["id", "v"])
    written = pq.ParquetFile(dataset.train.row_groups[0].path).schema_arrow.field("v").type
    assert (written == pa.list_(pa.float64(), 3)) is not first_sparse
    rows = everything(dataset, dataset.train)["v"]
    expected = [[0.0, 5.0, 0.0] if vector["type"] == 0 else [1.0, 0.0, 2.0] for vector in table["v"].to_pylist()]
    assert rows.tolist() == expected


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("first_sparse", [False, True])
@pytest.mark.parametrize("is_copied", [False, True])
def test_our_files_of_one_vector_column_are_read_by_path_dense_or_sparse_as_they_are(
    tmp_path: Path, store: Store, first_sparse: bool, is_copied: bool, float32: bool
) -> None:
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 0.0, 2.0]}
    sparse = {"type": 0, "size": 3, "indices": [1], "values": [5.0]}
    (tmp_path / "in").mkdir()
    for number, vector in enumerate([sparse, dense] if first_sparse else [dense, sparse]):
        table = pa.table({"id": range(number * 10, number * 10 + 10), "v": pa.array([vector] * 10, vector_type())})
        part = materialize(table, store, columns=["id", "v"], float32=float32)
        Path(part.train.row_groups[0].path).rename(tmp_path / "in" / f"{number}.parquet")
    types = {pq.read_schema(tmp_path / "in" / f"{number}.parquet").field("v").type for number in range(2)}
    assert len(types) == 2
    dataset = materialize(tmp_path / "in", store, columns=["id", "v"], in_place=not is_copied)
    assert dataset.schema["v"] == Column("v", ColumnKind.VECTOR, "float64", (3,))
    rows = everything(dataset, dataset.train)["v"].tolist()
    parts = [[[0.0, 5.0, 0.0]] * 10, [[1.0, 0.0, 2.0]] * 10]
    assert rows == (parts[0] + parts[1] if first_sparse else parts[1] + parts[0])
    by_path = ParquetReader(tmp_path / "in", ["id", "v"], batch_size=20, shuffle=False)
    assert [row for batch in by_path for row in batch["v"].tolist()] == rows


@pytest.mark.long
def test_row_groups_are_sized_so_that_the_ranks_can_share_them(store: Store) -> None:
    table = pa.table({"id": np.arange(100_000)})
    dataset = materialize(table, store, columns=["id"], num_proc=4, partitions_per_process=5)
    assert len(dataset.train.row_groups) == 20
    assert {group.rows for group in dataset.train.row_groups} == {5000}
    wide = pa.table({"id": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(50 << 20, np.uint8)), 1 << 20)})
    assert max(group.rows for group in materialize(wide, store, columns=["id"]).train.row_groups) <= 16


def test_a_ratio_gives_exact_parts_that_are_the_same_each_time(frame: pd.DataFrame, store: Store) -> None:
    datasets = [
        materialize(frame, store, columns=["id"], validation=0.2, seed=seed, num_proc=n)
        for seed, n in [(1, 1), (1, 4), (2, 1)]
    ]
    parts = [(everything(d, d.train)["id"].tolist(), everything(d, d.validation)["id"].tolist()) for d in datasets]
    assert all(sorted(train + held) == list(range(ROWS)) for train, held in parts)
    assert abs(len(parts[0][1]) - 80) <= 1
    assert parts[0] == parts[1]
    assert parts[0] != parts[2]


def test_a_column_marks_the_rows_for_validation(frame: pd.DataFrame, store: Store) -> None:
    dataset = materialize(frame, store, columns=["id"], validation="held")
    assert everything(dataset, dataset.validation)["id"].tolist() == list(range(0, ROWS, 5))
    assert dataset.schema.names == ("id",)


def test_one_worker_with_the_double_batch_sees_what_two_workers_see(frame: pd.DataFrame, store: Store) -> None:
    alone = order_of(materialize(frame, store, columns=["id"], num_proc=1), 64)
    two = materialize(frame, store, columns=["id"], num_proc=2)
    ranks = [order_of(two, 32, rank, 2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(step) for step in alone]


def test_two_data_sets_never_share_a_folder_and_are_removed_one_by_one(frame: pd.DataFrame, store: Store) -> None:
    one, other = (materialize(frame, store, columns=["id"], validation=0.5) for _ in range(2))
    one.remove()
    one.remove()
    assert len(everything(other, other.train)["id"]) + len(everything(other, other.validation)["id"]) == ROWS
    other.remove()
    assert store.list(store.prefix) == []


def test_a_name_that_is_taken_is_refused_and_its_data_stays(frame: pd.DataFrame, store: Store) -> None:
    first = materialize(frame, store, columns=["id"], dataset_id="mine")
    with pytest.raises(DataError, match=r"intermediate_train_data\.mine' holds data already"):
        materialize(frame, store, columns=["id"], dataset_id="mine")
    assert len(everything(first, first.train)["id"]) == ROWS


# --- Parquet in place -----------------------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path: Path, frame: pd.DataFrame) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    table = pa.Table.from_pandas(frame[["id", "list", "name", "held"]], preserve_index=False)
    for number in range(2):
        pq.write_table(table.slice(number * 200, 200), folder / f"{number}.parquet", row_group_size=50)
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / ".hidden.parquet").write_bytes(b"no parquet")
    return folder


@pytest.mark.parametrize("single", [False, True])
def test_parquet_is_used_where_it_is(parquet: Path, store: Store, single: bool) -> None:
    path = parquet / "0.parquet" if single else parquet
    dataset = materialize(str(path), store, columns=["id", "list"])
    assert dataset.folders == ()
    assert dataset.schema["list"] == Column("list", ColumnKind.LIST, "float64", (2,))
    assert everything(dataset, dataset.train)["id"].tolist() == list(range(200 if single else ROWS))
    dataset.remove()
    assert (parquet / "0.parquet").exists()
    assert not store.exists(store.prefix)


def test_a_ratio_takes_a_piece_of_each_row_group_in_place(parquet: Path, store: Store) -> None:
    dataset = materialize(parquet, store, columns=["id"], validation=0.3)
    train, held = (
        everything(dataset, dataset.train)["id"].tolist(),
        everything(dataset, dataset.validation)["id"].tolist(),
    )
    assert sorted(train + held) == list(range(ROWS))
    assert len(held) == 120
    assert np.bincount(np.array(held) // 50).tolist() == [15] * 8
    assert dataset.folders == ()


def test_a_validation_column_makes_a_copy(parquet: Path, store: Store) -> None:
    dataset = materialize(str(parquet), store, columns=["id", "list"], validation="held")
    assert everything(dataset, dataset.validation)["id"].tolist() == list(range(0, ROWS, 5))
    assert len(dataset.folders) == 2


def test_a_written_data_set_can_be_read_as_parquet(frame: pd.DataFrame, store: Store) -> None:
    written = materialize(frame, store, columns=["id", "list", "name"])
    read = materialize(written.folders[0], store, columns=["id", "list"])
    assert read.store is store
    assert everything(read, read.train)["id"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("mark", ["_INCOMPLETE", "_temporary/0/part.parquet"])
def test_half_written_data_is_never_taken_for_whole(parquet: Path, store: Store, mark: str) -> None:
    (parquet / mark).parent.mkdir(parents=True, exist_ok=True)
    (parquet / mark).write_bytes(b"")
    with pytest.raises(DataError, match="still being written, or its writer died"):
        materialize(str(parquet), store, columns=["id"])


def test_nulls_and_ragged_lists_in_parquet_are_found_before_the_fit(tmp_path: Path, store: Store) -> None:
    lists: list[Any] = [[1.0, 2.0]] * 50
    table = pa.table({"n": [1] * 49 + [None], "l": lists, "x": [0.5] * 50})
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "0.parquet", row_group_size=10)
    lists[33] = [1.0]
    pq.write_table(table.set_column(1, "l", pa.array(lists)), tmp_path / "in" / "1.parquet", row_group_size=10)
    with pytest.raises(DataError) as caught:
        materialize(str(tmp_path / "in"), store, columns=["n", "l", "x"])
    assert "column 'n' holds 2 nulls" in str(caught.value)
    assert "column 'l' holds lists of different lengths, 2 and 1" in str(caught.value)
    assert "'x'" not in str(caught.value)


def test_files_whose_columns_differ_are_named(parquet: Path, store: Store) -> None:
    pq.write_table(pa.table({"id": ["text"]}), parquet / "2.parquet")
    with pytest.raises(
        DataError, match=r"columns of .*2\.parquet have other types .*: 'id' is string and was int64\. Write"
    ):
        materialize(str(parquet), store, columns=["id"])


@pytest.mark.parametrize("first_days", [False, True])
def test_files_of_which_one_counts_days_and_the_other_moments_are_named(
    tmp_path: Path, store: Store, first_days: bool
) -> None:
    (tmp_path / "in").mkdir()
    days, moments = pa.array([20_000], pa.date32()), pa.array([20_000 * 86_400_000_000], pa.timestamp("us"))
    for number, times in enumerate([days, moments] if first_days else [moments, days]):
        pq.write_table(pa.table({"when": times}), tmp_path / "in" / f"{number}.parquet")
    with pytest.raises(DataError, match=r"columns of .*1\.parquet have other types .*: 'when' is .* and was"):
        materialize(tmp_path / "in", store, columns=["when"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "no Parquet at"),
        (lambda folder: folder.parent, "no Parquet in"),
        (
            lambda folder: (folder / "0.parquet").rename(folder.parent / "x.parquet") and folder / "0.parquet",
            "no Parquet at",
        ),
        (
            lambda folder: (folder / "0.parquet").write_bytes(b"PAR1 junk") and folder,
            r"0\.parquet is not a whole Parquet",
        ),
    ],
    ids=["nothing", "other files", "moved", "junk"],
)
def test_what_is_not_parquet_is_named(parquet: Path, store: Store, make: Any, message: str) -> None:
    (parquet / "a=1").mkdir()
    if message == "no Parquet in":
        for file in [*parquet.rglob("*.parquet")]:
            file.unlink()
    with pytest.raises(DataError, match=message):
        materialize(str(make(parquet)), store, columns=["id"])


def test_partitioned_folders_give_a_column_and_must_be_alike(parquet: Path, store: Store) -> None:
    (parquet / "a=1").mkdir()
    (parquet / "0.parquet").rename(parquet / "a=1" / "0.parquet")
    with pytest.raises(DataError, match="all files of a data set lie below the same key=value folders"):
        materialize(str(parquet), store, columns=["id"])
    (parquet / "a=2").mkdir()
    (parquet / "1.parquet").rename(parquet / "a=2" / "1.parquet")
    data = materialize(str(parquet), store, columns=["id", "a"])
    (batch,) = ParquetReader(data, batch_size=400, shuffle=False)
    assert batch["a"].tolist() == [1] * 200 + [2] * 200


# --- bad input ------------------------------------------------------------------------------------------------------


def test_wrong_names_are_reported_together_with_near_misses(frame: pd.DataFrame, store: Store) -> None:
    with pytest.raises(DataError) as caught:
        materialize(frame, store, columns=["ID", "imgae", "zzz"], validation="hold")
    text = str(caught.value)
    assert "no column 'ID'; did you mean 'id'?" in text
    assert "no column 'imgae'; did you mean 'image'?" in text
    assert "no column 'zzz'\n" in text
    assert "no column 'hold'; did you mean 'held'?" in text
    assert "'nullable'" in text


def test_nulls_and_ragged_lists_are_reported_together_and_nothing_stays(frame: pd.DataFrame, store: Store) -> None:
    frame["x"] = np.where(frame["id"] < 3, np.nan, 1.0)
    frame.at[7, "vector"] = np.zeros(5, dtype=np.float32)
    frame.at[8, "list"] = [1.0, None]
    frame.loc[9, "nullable"] = pd.NA
    with pytest.raises(DataError) as caught:
        materialize(frame, store, columns=["id", "x", "vector", "list", "nullable"])
    text = str(caught.value)
    assert "column 'x' holds 3 nulls: fill them (df.fillna) or drop those rows (df.dropna)" in text
    assert "column 'vector' holds lists of different lengths, 2 and 5" in text
    assert "column 'list' holds 1 null inside its lists" in text
    assert "column 'nullable' holds 1 null" in text
    assert store.list(store.prefix) == []


@pytest.mark.parametrize("array", [np.ones((2, 3)), torch.ones(2)])
@pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
def test_what_a_join_leaves_among_arrays_is_a_null(store: Store, array: Any, missing: Any) -> None:
    for values in ([array, array, missing], [missing, array, array]):
        with pytest.raises(DataError, match="column 'image' holds 1 null"):
            materialize(pd.DataFrame({"image": values}), store, columns=["image"])


def test_arrays_of_different_shapes_and_mixed_types_are_reported_together(frame: pd.DataFrame, store: Store) -> None:
    frame.at[3, "image"] = np.zeros((3, 2), dtype=np.uint8)
    frame["mixed"] = [1, "two"] * (ROWS // 2)
    frame["huge"] = [2**70] * ROWS
    with pytest.raises(DataError) as caught:
        materialize(frame, store, columns=["image", "mixed", "huge"])
    assert "'image'" in str(caught.value)
    assert "different shapes, (2, 3) and (3, 2)" in str(caught.value)
    assert "'mixed' cannot be converted" in str(caught.value)
    assert "'huge' cannot be converted" in str(caught.value)


@pytest.mark.parametrize("empty", [pd.DataFrame({"id": []}), pa.table({"id": pa.array([], pa.int64())})])
def test_empty_data_is_refused(empty: Any, store: Store) -> None:
    with pytest.raises(DataError, match="the data has no rows"):
        materialize(empty, store, columns=["id"])
    assert not store.exists(store.prefix)


@pytest.mark.parametrize(
    ("held", "message"), [([1, 1], "no row of 2 is left for training"), ([0, 0], "no row of 2 is for validation")]
)
def test_an_empty_part_is_refused_and_nothing_stays(held: list[int], message: str, store: Store) -> None:
    with pytest.raises(DataError, match=message):
        materialize(pd.DataFrame({"id": [1, 2], "held": held}), store, columns=["id"], validation="held")
    assert store.list(store.prefix) == []


def test_lists_without_elements_are_refused(store: Store) -> None:
    with pytest.raises(DataError, match="'l' holds only empty lists"):
        materialize(pa.table({"l": pa.array([[], []], pa.list_(pa.int8()))}), store, columns=["l"])


def test_ragged_lists_are_kept_where_that_is_allowed(store: Store) -> None:
    table = pa.table({"l": [[1], [1, 2]]})
    assert materialize(table, store, columns=["l"], allow_ragged=True).schema["l"].shape == (UNKNOWN,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_proc": 0}, "num_proc is 0"),
        ({"partitions_per_process": 0}, "partitions_per_process 0"),
        ({"columns": []}, "no columns"),
        ({"validation": "id"}, "'id' cannot be a feature"),
        ({"validation": "name"}, "validation column 'name' holds (large_)?string"),
        ({"data": [1, 2]}, "cannot train on builtins.list"),
    ],
)
def test_arguments_out_of_range_are_refused(frame: pd.DataFrame, store: Store, arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        materialize(**{"data": frame, "store": store, "columns": ["id"], **arguments})
    assert not store.exists(store.prefix)


def test_a_store_that_cannot_be_written_is_told_before_the_work(frame: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written"):
        materialize(frame, Store.create(tmp_path / "file" / "store"), columns=["id"])


def test_without_pyarrow_the_extra_to_install_is_named() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None; sys.modules['pyspark'] = None\n"
        "import hvd_cluster.data.materializing as m, hvd_cluster.data.reader, hvd_cluster.data.reading.tensors\n"
        "from hvd_cluster.data.store import Store\n"
        "try: m.materialize('x', Store.create('/tmp/x'), columns=['a'])\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MissingExtraError pyarrow is not installed")
    assert "extra [data]" in done.stdout


@pytest.mark.parametrize("kind", ["table", "Parquet in place", "Parquet copied"])
def test_everything_that_is_wrong_with_the_columns_is_told_at_once(tmp_path: Path, kind: str) -> None:
    table = pa.table(
        {
            "many": pa.array([None] * 7 + [1.0] * 5),
            "one": pa.array([*range(11), None]),
            "text": ["a"] * 12,
            "struct": [{"q": 1}] * 12,
            "ragged": [[1.0]] * 11 + [[1.0, 2.0]],
            "fine": range(12),
        }
    )
    data: Any = table
    if kind != "table":
        data = tmp_path / "in"
        data.mkdir()
        pq.write_table(table, data / "0.parquet", row_group_size=5)
    with pytest.raises(DataError) as raised:
        materialize(
            data,
            tmp_path / "work",
            columns=[*table.column_names, "absent"],
            tensors_only=True,
            in_place=kind != "Parquet copied",
        )
    lines = str(raised.value).splitlines()
    for wanted in (
        "there is no column 'absent'",
        "column 'struct' has the type struct",
        "no tensor can be made of column 'text'",
        "column 'many' holds 7 nulls",
        "column 'one' holds 1 null",
        "column 'ragged' holds lists of different lengths",
    ):
        assert sum(line.startswith(wanted) for line in lines) == 1, lines
    assert "'fine' holds" not in str(raised.value)
    assert not list(tmp_path.glob("work/**/*.parquet"))


def test_nulls_of_a_sample_are_told_as_those_of_the_first_rows(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"x": pa.array([None, 1.0]), "s": ["a", "b"]})
    with pytest.raises(DataError) as raised:
        write_arrow([batch], tmp_path, tensors_only=True, first_rows=2)
    assert "column 'x' holds 1 null in the first 2 rows" in str(raised.value)
    assert "no tensor can be made of column 's'" in str(raised.value)
    with pytest.raises(DataError, match="column 'x' holds 1 null: "):  # these are all rows
        write_arrow([batch], tmp_path, first_rows=32)
