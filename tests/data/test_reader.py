"""Batches from Parquet: the right numbers, in an order that threads do not change, and errors that say where."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading import budget
from hvd_cluster.data.schema import Column, ColumnKind
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.topology import Topology

ROWS = 500
#: 16 bytes a row (int64, 2 * float32): windows of 64 rows.
SMALL_WINDOW_BYTES = 16 * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with row groups of 40 rows: ``id`` counts the rows, ``f`` is [id, 2 * id], ``s`` is its name."""
    ids = np.arange(ROWS)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.stack([ids, 2 * ids], 1).astype("f4").reshape(-1)), 2)
    table = pa.table({"id": ids, "f": pairs, "s": [f"name {i}" for i in ids]})
    (tmp_path / "in").mkdir()
    for number, begin in enumerate(range(0, ROWS, 200)):
        pq.write_table(table.slice(begin, 200), tmp_path / "in" / f"part-{number}.parquet", row_group_size=40)
    return tmp_path / "in"


@pytest.fixture
def dataset(folder: Path) -> Dataset:
    return materialize(str(folder), Store.create(folder), columns=["id", "f"], num_proc=2)


def reader(dataset: Dataset, **options: Any) -> ParquetReader:
    options = {"batch_size": 16, "window_bytes": SMALL_WINDOW_BYTES, **options}
    return ParquetReader(dataset.train, dataset.schema, dataset.store, **options)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def test_each_row_arrives_once_and_its_columns_stay_together(dataset: Dataset) -> None:
    batches = list(reader(dataset, remainder="partial").epoch(0))
    seen = torch.cat([batch["id"] for batch in batches])
    assert sorted(seen.tolist()) == list(range(ROWS))
    assert seen.tolist() != list(range(ROWS))
    features = torch.cat([batch["f"] for batch in batches])
    assert torch.equal(features, torch.stack([seen, 2 * seen], 1).float())


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_the_same_for_any_number_of_threads_and_any_bound(dataset: Dataset, shuffle: bool) -> None:
    orders = [
        ids(reader(dataset, shuffle=shuffle, num_threads=threads, prefetch_bytes=bound, rank=1, size=3).epoch(5))
        for threads, bound in [(1, 1), (1, 10**9), (4, 3000), (8, 10**9)]
    ]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("transform", [None, lambda row: row], ids=["plain", "transform"])
def test_the_order_is_the_same_in_whatever_chunks_windows_are_read(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, shuffle: bool, transform: Any
) -> None:
    def batches(chunk_rows: int, rank: int) -> list[Any]:
        monkeypatch.setattr(budget, "CHUNK_BYTES", 16 * chunk_rows)
        options = {"rank": rank, "size": 3, "remainder": "partial", "shuffle": shuffle, "num_threads": 4}
        found = reader(dataset, window_bytes=16 * 150, transformation_fn=transform, **options).epoch(3)
        return [(batch["id"].tolist(), batch["f"].tolist()) for batch in found]

    whole = [batches(10**6, rank) for rank in range(3)]
    for chunk_rows in (1, 40, 90):
        assert [batches(chunk_rows, rank) for rank in range(3)] == whole
    assert sorted(row for rank in whole for rows, _ in rank for row in rows) == list(range(ROWS))


def test_a_worker_that_forgets_its_rank_is_told(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert reader(dataset).rows == ROWS
    assert not caplog.records
    for name, value in Topology(rank=1, size=2, local_rank=1, local_size=2).to_env().items():
        monkeypatch.setenv(name, value)
    assert sorted(itertools.chain(*ids(reader(dataset, remainder="partial")))) == list(range(ROWS))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "this is rank 1 of 2, but it reads shard 0 of 1"
    ]
    reader(dataset, rank=0, size=1)
    assert len(caplog.records) == 1


def test_epochs_differ_and_repeat(dataset: Dataset) -> None:
    one = reader(dataset)
    assert ids(one.epoch(0)) == ids(one.epoch(0)) == ids(reader(dataset).epoch(0))
    assert ids(one.epoch(0)) != ids(one.epoch(1))
    assert ids(one.epoch(0)) != ids(reader(dataset, seed=1).epoch(0))


@pytest.mark.parametrize("window_bytes", [SMALL_WINDOW_BYTES, 1 << 20])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_take_the_global_batches_of_one_process(dataset: Dataset, size: int, window_bytes: int) -> None:
    options = {"window_bytes": window_bytes, "remainder": "pad"}
    alone = [sorted(step) for step in ids(reader(dataset, batch_size=8 * size, **options).epoch(2))]
    ranks = [ids(reader(dataset, batch_size=8, rank=r, size=size, **options).epoch(2)) for r in range(size)]
    assert [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)] == alone


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("start", [0, 1, 7, 30, 31, 40])
def test_an_epoch_can_begin_at_any_step(dataset: Dataset, size: int, start: int) -> None:
    one = reader(dataset, batch_size=5, rank=size - 1, size=size)
    assert ids(one.epoch(1, start_step=start)) == ids(one.epoch(1))[start:]


def test_more_ranks_than_row_groups_all_get_the_same_number_of_steps(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    data = materialize(pa.table({"id": np.arange(100)}), store, columns=["id"], num_proc=8)
    assert len(data.train.row_groups) == 1
    ranks = [ids(reader(data, batch_size=4, rank=r, size=8).epoch(0)) for r in range(8)]
    assert {len(steps) for steps in ranks} == {3}
    assert len(set(itertools.chain(*itertools.chain(*ranks)))) == 96


def test_the_last_partial_batch_may_be_empty_on_some_ranks_but_keeps_its_shape(dataset: Dataset) -> None:
    # 500 rows, 3 ranks of 166: one full step of 498 rows, then two rows for three ranks.
    last = [list(reader(dataset, batch_size=166, rank=r, size=3, remainder="partial").epoch(0))[-1] for r in range(3)]
    assert [len(batch["id"]) for batch in last] == [1, 1, 0]
    assert last[2]["f"].shape == (0, 2)
    assert last[2]["f"].dtype == torch.float32


def test_a_reader_without_a_full_batch_has_no_steps(dataset: Dataset) -> None:
    too_large = reader(dataset, batch_size=501)
    assert too_large.steps == 0
    assert list(too_large.epoch(0)) == []


@pytest.mark.long
def test_closing_or_dropping_an_iterator_ends_its_threads(dataset: Dataset) -> None:
    # With room for one window at a time, there is work left for the threads after the first batch.
    options: dict[str, Any] = {"num_threads": 3, "window_bytes": 8 * 40, "prefetch_bytes": 1}
    batches = reader(dataset, **options).epoch(0)
    next(batches)
    batches.close()
    assert not _reader_threads()
    batches = reader(dataset, **options).epoch(0)
    next(batches)
    assert _reader_threads()
    del batches
    gc.collect()
    assert not _reader_threads()


def test_batches_may_be_changed_in_place_without_changing_others(dataset: Dataset) -> None:
    expected = ids(reader(dataset, shuffle=False, window_bytes=1 << 20).epoch(0))
    changed = []
    for batch in reader(dataset, shuffle=False, window_bytes=1 << 20).epoch(0):
        changed.append(batch["id"].tolist())
        batch["id"].fill_(-1)
    assert changed == expected


def test_readers_can_be_made_from_pickled_values(dataset: Dataset) -> None:
    again = pickle.loads(pickle.dumps(dataset))
    assert again == dataset
    assert ids(reader(again).epoch(0)) == ids(reader(dataset).epoch(0))


# --- transformation_fn ----------------------------------------------------------------------------------------------


def with_strings(folder: Path, fn: Callable[[dict[str, Any]], Any], **options: Any) -> ParquetReader:
    data = materialize(str(folder), Store.create(folder), columns=["id", "f", "s"])
    return reader(data, transformation_fn=fn, **options)


def test_a_transform_turns_strings_into_tensors(folder: Path) -> None:
    def encode(row: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(row["s"], str)
        return {"id": row["id"], "length": len(row["s"]), "f": torch.from_numpy(row["f"]) * 2}

    strings = with_strings(folder, encode, num_threads=3)
    assert [(c.name, c.kind, c.dtype, c.shape) for c in strings.schema] == [
        ("id", ColumnKind.NUMERIC, "int64", ()),
        ("length", ColumnKind.NUMERIC, "int64", ()),
        ("f", ColumnKind.LIST, "float32", (2,)),
    ]
    for batch in strings.epoch(0):
        assert batch["length"].tolist() == [len(f"name {i}") for i in batch["id"].tolist()]
        assert torch.equal(batch["f"][:, 1], batch["id"].float() * 4)


def test_the_function_sees_each_row_on_one_rank_only(folder: Path) -> None:
    seen: list[int] = []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(int(row["id"]))
        return {"id": row["id"]}

    for rank in range(2):
        strings = with_strings(folder, note, rank=rank, size=2, batch_size=10, window_bytes=1 << 20)
        assert strings.schema.names == ("id",)
        seen.remove(0)  # the first row, to learn the schema
        taken = ids(strings.epoch(0))
        assert sum(map(len, taken)) == ROWS // 2
    assert sorted(seen) == list(range(ROWS))


def test_strings_without_a_transform_are_refused_with_the_remedy(folder: Path) -> None:
    data = materialize(str(folder), Store.create(folder), columns=["id", "s"])
    with pytest.raises(DataError, match=r"'s' \(string\).*transformation_fn"):
        reader(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda row: {"id": row["id"], "x": np.zeros(3 if row["id"] == 250 else 2)},
            r"shape \(3,\).*'x'.*row 10 of row gr",
        ),
        (lambda row: {"id": row["id"], "x": 0.5 if row["id"] == 250 else 1}, "dtype float64.*'x'.*row 10 of row gr"),
        (lambda row: {"id": row["id"]} if row["id"] == 250 else {"id": row["id"], "x": 1}, "row 10 of row group 1 of"),
        (lambda row: {"id": 1 // (row["id"] - 250)}, "failed on row 10 of row group 1 of .*part-1"),
        (lambda row: None if row["id"] == 250 else {"id": 1}, "returned NoneType"),
        (lambda row: {"s": row["s"]}, "returned str in column 's'"),
    ],
    ids=["shape", "dtype", "columns", "raises", "none", "text"],
)
@pytest.mark.filterwarnings("error")
def test_a_row_that_does_not_fit_is_named(folder: Path, change: Any, message: str) -> None:
    def whole(row: dict[str, Any]) -> Any:
        with np.errstate(divide="raise"):
            return change(row)

    with pytest.raises(DataError, match=message):
        list(with_strings(folder, whole, num_threads=2).epoch(0))


def test_ragged_lists_reach_a_transform_row_by_row(tmp_path: Path) -> None:
    lists = [[float(j) for j in range(i % 4)] for i in range(50)]
    data = materialize(
        pa.table({"id": range(50), "l": lists}), Store.create(tmp_path), columns=["id", "l"], allow_ragged=True
    )

    def pad(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "l": np.pad(row["l"], (0, 3 - len(row["l"])))}

    for batch in reader(data, transformation_fn=pad, batch_size=10).epoch(0):
        lengths = batch["id"] % 4
        assert torch.equal(batch["l"].sum(1), (lengths * (lengths - 1) / 2).double())


# --- broken data ----------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_named_with_its_row_group(dataset: Dataset, folder: Path) -> None:
    file = folder / "part-1.parquet"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match=r"cannot read row group \d+ of .*part-1\.parquet"):
        list(reader(dataset).epoch(0))
    assert not _reader_threads()


def test_a_file_that_is_gone_is_named(dataset: Dataset, folder: Path) -> None:
    (folder / "part-2.parquet").unlink()
    with pytest.raises(DataError, match=r"part-2\.parquet"):
        list(reader(dataset).epoch(0))


def test_lists_that_the_footers_could_not_distinguish_are_found_while_reading(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    # On average two elements in every row group: only the rows tell.
    table = pa.table({"l": [[1.0, 2.0]] * 10 + [[1.0], [1.0, 2.0, 3.0]] * 5})
    pq.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=10)
    data = materialize(str(tmp_path / "in"), Store.create(tmp_path), columns=["l"])
    assert data.schema["l"] == Column("l", ColumnKind.LIST, "float64", (2,))
    with pytest.raises(
        DataError, match=r"(?s)row group 1 of .*a\.parquet.*'l' holds lists of different lengths, 2 and 1"
    ):
        list(reader(data, batch_size=2).epoch(0))


def test_numbers_that_make_no_sense_are_refused(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="batch_size is 0"):
        reader(dataset, batch_size=0)


def _reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hvd-reader")]


@pytest.mark.slow
def test_a_program_that_ends_in_mid_epoch_ends_quietly(tmp_path: Path) -> None:
    columns = {f"x{index}": np.random.default_rng(index).standard_normal(300_000) for index in range(8)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=10_000)
    program = Path(__file__).parent / "programs" / "exits_between_epochs.py"
    ended = subprocess.run(
        [sys.executable, program, tmp_path / "a.parquet"], capture_output=True, text=True, check=True, timeout=100
    )
    assert ended.stdout.split() == ["0"] * 12
    assert ended.stderr == ""


def reading_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} - {"MainThread"}


def test_a_with_block_releases_threads_and_files_also_after_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(4000)}), tmp_path / "0.parquet", row_group_size=100)
    before = reading_threads()
    reader = ParquetReader(str(tmp_path), batch_size=10, num_epochs=3, prefetch_bytes=2000, window_bytes=800)
    iterations = []

    def fails() -> None:
        with reader as entered:
            assert entered is reader
            iterations.extend([iter(reader), reader.epoch(5)])
            for batches in iterations:
                next(batches)
            assert reading_threads() > before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert reading_threads() == before
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in _target(link)]
    reader.close()
    reader.close()
    with pytest.raises(DataError, match="closed while it was iterated over"):
        next(iterations[0])
    with reader:  # what is left of the epoch
        assert sum(1 for _ in reader) == 399
        assert reader.position.epoch == 1


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
