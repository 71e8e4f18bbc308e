"""Columns that a file lacks, or its folder names null, have the type and layout of those that other files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data import ParquetReader, materialize
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.writing.part_writer import OnPart, RemoteParts
from hvd_cluster.errors import DataError

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


def seen(data: Any, name: str) -> list[Any]:
    """The four values of a column that a function over batches gets; None for NaN too."""
    values: list[Any] = []

    def fn(batch: dict[str, Any]) -> npt.NDArray[Any]:
        values.extend(one.tolist() if isinstance(one, np.ndarray) else one for one in batch[name])
        return np.zeros(len(batch[name]))

    preprocess = Preprocess(fn=fn, columns=(name,))
    list(ParquetReader(data, preprocess=preprocess, batch_size=4, shuffle=False, num_threads=1))
    return [None if value is None or value != value else value for value in values[-4:]]


def check(folder: Path, store: Path, name: str, wanted: list[Any]) -> None:
    """The data where they are, and a copy of them."""
    assert seen(str(folder), name) == wanted
    for in_place in (True, False):
        assert seen(materialize(str(folder), store, columns=[name], raw=[name], in_place=in_place), name) == wanted


@pytest.mark.parametrize("lacks_first", [False, True])
@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b"]),
        pa.array([b"a", b"b"], pa.large_binary()),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array(pd.Categorical(["a", "b"])),
        pa.array([1.5, 2.5]).dictionary_encode(),
        pa.array([[1, 2], [3]]),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_of_any_layout_is_null_in_a_file_that_lacks_it(tmp_path: Path, column: Any, lacks_first: bool) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"y": [1, 2]}), tmp_path / "in" / f"{int(not lacks_first)}.parquet")
    pq.write_table(pa.table({"y": [3, 4], "x": column}), tmp_path / "in" / f"{int(lacks_first)}.parquet")
    held, nulls = column.to_pylist(), [None, None]
    check(tmp_path / "in", tmp_path / "store", "x", nulls + held if lacks_first else held + nulls)


@pytest.mark.parametrize("lacks_first", [False, True])
@pytest.mark.parametrize("value", [7, "text"])
def test_a_folder_that_names_null_has_the_type_of_the_others(tmp_path: Path, value: Any, lacks_first: bool) -> None:
    for number, name in ((int(not lacks_first), NULL_FOLDER), (int(lacks_first), value)):
        folder = tmp_path / "in" / f"n={number}" / f"k={name}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"y": [1, 2]}), folder / "a.parquet")
    held, nulls = [value] * 2, [None, None]
    check(tmp_path / "in", tmp_path / "store", "k", nulls + held if lacks_first else held + nulls)


def test_text_that_a_file_lacks_is_filled_and_decoded(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [1, 2]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"y": [3, 4], "x": ["a", "b"]}), tmp_path / "1.parquet")
    rules: dict[str, Any] = {"decode": {"x": lambda text: float(ord(text))}, "fill_nulls": {"x": "z"}}
    (batch,) = ParquetReader(str(tmp_path), batch_size=4, shuffle=False, **rules)
    assert batch["x"].tolist() == [122, 122, 97, 98]


def parts_of(*columns: Any) -> RemoteParts:
    """A part for each column, in its own type, as the blocks of a Ray Dataset are."""

    def each(on_part: OnPart) -> list[dict[str, Any]]:
        return [on_part(part, iter(pa.table({"x": column}).to_batches())) for part, column in enumerate(columns)]

    return RemoteParts(pa.schema({"x": columns[0].type}), each)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.nulls(2), pa.array(["a", "b"])),
        (pa.nulls(2), pa.array([[1, 2], [3]])),
        (pa.array([1, 2]), pa.array([1.5, None])),
        (pa.array(["a", None]), pa.array(["b", "c"], pa.large_string())),
        (pa.nulls(2), pa.nulls(2)),
    ],
    ids=lambda column: str(column.type),
)
def test_parts_that_hold_a_column_in_other_types_are_read_in_a_common_one(
    tmp_path: Path, one: Any, other: Any, is_first: bool
) -> None:
    columns = (one, other) if is_first else (other, one)
    dataset = materialize(parts_of(*columns), tmp_path, columns=["x"], raw=["x"])
    assert seen(dataset, "x") == [value for column in columns for value in column.to_pylist()]


def test_parts_that_hold_a_column_in_types_without_a_common_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="columns of .* have other types than those of .*: 'x' is string and was int64"):
        materialize(parts_of(pa.array([1, 2]), pa.array(["a", "b"])), tmp_path, columns=["x"], raw=["x"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("ordered", [False, True])
def test_categories_of_pandas_are_decoded_beside_a_file_that_lacks_them(tmp_path: Path, ordered: bool) -> None:
    pd.DataFrame({"s": pd.Categorical(["a", "bb"], ordered=ordered)}).to_parquet(tmp_path / "0.parquet")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "1.parquet")
    options: dict[str, Any] = {"decode": {"s": len}, "fill_nulls": {"s": "none"}}
    reader = ParquetReader(tmp_path, ["s"], batch_size=3, shuffle=False, **options)
    assert [batch["s"].tolist() for batch in reader] == [[1, 2, 4]]
