from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import TransformSpec, make_batch_reader, make_reader
from hvd_cluster.petastorm.pytorch import (
    BatchedDataLoader,
    DataLoader,
    InMemBatchedDataLoader,
    decimal_friendly_collate,
)
from hvd_cluster.petastorm.transform import edit_field

ROWS = 60
LOADERS: list[Any] = [DataLoader, BatchedDataLoader]
READERS: list[Any] = [make_reader, make_batch_reader]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    table = pa.table(
        {
            "id": pa.array(range(ROWS)),
            "x": pa.array([[i, i / 2] for i in range(ROWS)], pa.list_(pa.float32())),
            "ragged": pa.array([[i] * (i % 3) for i in range(ROWS)], pa.list_(pa.int32())),
            "u16": pa.array(range(ROWS), pa.uint16()),
            "u32": pa.array(range(ROWS), pa.uint32()),
            "flag": [i % 2 == 0 for i in range(ROWS)],
            "name": [f"n{i}" for i in range(ROWS)],
            "price": [Decimal(i) / 4 for i in range(ROWS)],
            "hole": pa.array([None if i == 50 else i for i in range(ROWS)]),
            "when": pa.array(range(ROWS), pa.timestamp("us")),
        }
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    return str(folder)


def loaded(loader: Any) -> list[dict[str, Any]]:
    with loader:
        return list(loader)


@pytest.mark.parametrize("make", READERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_are_cut_over_row_groups_in_order(url: str, make: Any, kind: Any) -> None:
    batches = loaded(kind(make(url, ["id", "x"], shuffle_row_groups=False), batch_size=16))
    assert [len(batch["id"]) for batch in batches] == [16, 16, 16, 12]
    ids = torch.arange(ROWS)
    assert torch.equal(torch.cat([batch["id"] for batch in batches]), ids)
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), torch.stack([ids, ids / 2], 1))


@pytest.mark.parametrize("make", READERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_numbers_become_dtypes_that_torch_can_work_with(url: str, make: Any, kind: Any) -> None:
    (batch,) = loaded(kind(make(url, ["u16", "u32", "flag", "x", "id"]), batch_size=ROWS))
    dtypes = {name: tensor.dtype for name, tensor in batch.items()}
    assert dtypes == {
        "u16": torch.int32,
        "u32": torch.int64,
        "flag": torch.uint8,
        "x": torch.float32,
        "id": torch.int64,
    }


@pytest.mark.parametrize("make", READERS)
def test_texts_and_decimals_are_lists_in_one_loader_and_refused_by_the_other(url: str, make: Any) -> None:
    options = {"shuffle_row_groups": False}
    batch = next(iter(loaded(DataLoader(make(url, ["name", "price"], **options), batch_size=3))))
    assert batch == {"name": ["n0", "n1", "n2"], "price": [Decimal(0), Decimal("0.25"), Decimal("0.5")]}
    for name in ("name", "price", "when"):
        with pytest.raises(TypeError, match=f"'{name}'.*TransformSpec"):
            loaded(BatchedDataLoader(make(url, [name]), batch_size=3))


@pytest.mark.parametrize("kind", LOADERS)
def test_nulls_and_ragged_rows_are_named(url: str, kind: Any) -> None:
    with pytest.raises(TypeError, match="'hole' holds None"):
        loaded(kind(make_reader(url, ["hole"]), batch_size=3))
    with pytest.raises(DataError, match="'ragged' differ in shape"):
        loaded(kind(make_batch_reader(url, ["ragged"]), batch_size=3))


@pytest.mark.parametrize("capacity", [10, 25, 1000])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_shuffling_queue_gives_each_row_once_in_another_order(url: str, kind: Any, capacity: int) -> None:
    def ids(seed: int) -> list[int]:
        reader = make_batch_reader(url, ["id", "x"], seed=seed, shuffle_row_groups=False)
        batches = loaded(kind(reader, batch_size=8, shuffling_queue_capacity=capacity))
        for batch in batches:
            assert torch.equal(batch["x"][:, 0], batch["id"].float()), "columns stay together"
        return [int(i) for batch in batches for i in batch["id"]]

    first = ids(1)
    assert sorted(first) == list(range(ROWS))
    assert first != list(range(ROWS))
    assert first == ids(1)
    assert first != ids(2)
    if capacity == 10:
        assert max(first[:8]) < 14, "no row from beyond the buffer"


def test_a_loader_makes_several_passes_and_then_stops_its_reader(url: str) -> None:
    with BatchedDataLoader(make_reader(url, ["id"]), batch_size=50) as loader:
        for _ in range(3):
            assert sorted(int(i) for batch in loader for i in batch["id"]) == list(range(ROWS))
        next(iter(loader))
        with pytest.raises(NotImplementedError):
            next(iter(loader))
    with pytest.raises(RuntimeError, match="stopped"):
        next(loader.reader)


def test_functions_of_ones_own_make_the_batches(url: str) -> None:
    rows = loaded(DataLoader(make_reader(url, ["id", "name"]), batch_size=4, collate_fn=list))
    assert sorted(row["name"] for batch in rows for row in batch) == sorted(f"n{i}" for i in range(ROWS))
    batch = loaded(
        BatchedDataLoader(make_reader(url, ["id"]), batch_size=ROWS, transform_fn=lambda a: torch.as_tensor(a).double())
    )[0]
    assert batch["id"].dtype == torch.float64


def test_a_transform_of_rows_is_stacked(url: str) -> None:
    spec = TransformSpec(
        lambda row: {"image": np.full((3, 2), row["id"], np.uint16)},
        edit_fields=[("image", np.uint16, (3, 2), False)],
        removed_fields=["id"],
    )
    reader = make_reader(url, ["id"], transform_spec=spec, shuffle_row_groups=False)
    (batch,) = loaded(BatchedDataLoader(reader, batch_size=ROWS))
    assert batch["image"].shape == (ROWS, 3, 2)
    assert batch["image"].dtype == torch.int32
    assert torch.equal(batch["image"][:, 2, 1], torch.arange(ROWS, dtype=torch.int32))


@pytest.mark.parametrize("kind", [*LOADERS, InMemBatchedDataLoader])
@pytest.mark.parametrize("make", READERS)
def test_tensors_that_a_transform_returns_are_stacked(url: str, make: Any, kind: Any) -> None:
    def of_row(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "x": torch.as_tensor(row["x"])[None] * 2, "id": torch.tensor(int(row["id"]))}

    def of_frame(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(x=[torch.tensor(x)[None] * 2 for x in frame["x"]])

    spec = TransformSpec(
        of_row if make is make_reader else of_frame, edit_fields=[edit_field("x", np.float32, (1, 2), False)]
    )
    reader = make(url, ["id", "x"], transform_spec=spec, shuffle_row_groups=False)
    first = loaded(kind(reader, batch_size=16))[0]
    assert torch.equal(first["id"], torch.arange(16))
    assert first["x"].dtype == torch.float32
    assert torch.equal(first["x"][:, 0], torch.stack([torch.arange(16) * 2, torch.arange(16)], 1).float())


def test_rows_in_memory_are_passed_over_several_times(url: str) -> None:
    def ids(**kargs: Any) -> list[int]:
        loader = InMemBatchedDataLoader(make_reader(url, ["id"], shuffle_row_groups=False), batch_size=4, **kargs)
        assert loader.reader._stopped
        return [int(i) for batch in loader for i in batch["id"]]

    assert ids(rows_capacity=10, num_epochs=2) == list(range(10)) * 2
    shuffled = ids(rows_capacity=10, num_epochs=2, shuffle=True, seed=3)
    assert shuffled[:10] != shuffled[10:]
    assert sorted(shuffled[:10]) == sorted(shuffled[10:]) == list(range(10))
    assert shuffled == ids(rows_capacity=10, num_epochs=2, shuffle=True, seed=3)
    assert len(ids(rows_capacity=1000)) == ROWS


def test_collating_rows_keeps_their_structure() -> None:
    rows = [{"a": 1.0, "b": (Decimal(1), "x")}, {"a": 2.0, "b": (Decimal(2), "y")}]
    batch = decimal_friendly_collate(rows)
    assert torch.equal(batch["a"], torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert batch["b"] == [[Decimal(1), Decimal(2)], ["x", "y"]]


def test_numbers_below_one_are_refused(url: str, tmp_path: Path) -> None:
    with make_reader(url) as reader:
        with pytest.raises(DataError, match="batch_size"):
            DataLoader(reader, batch_size=0)
        with pytest.raises(DataError, match="batch_size"):
            InMemBatchedDataLoader(reader, batch_size=0)
