"""What columns become: every type, declared shapes, padding, nulls by policy, decode functions."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.columns.column_config import padded
from hvd_cluster.data.columns.vectors import vector_type
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading import budget
from hvd_cluster.data.reading.decoding import RawTensor
from hvd_cluster.data.schema import Column, ColumnKind
from hvd_cluster.errors import DataError


def one_batch(folder: Path, table: pa.Table, columns: Any = None, **options: Any) -> dict[str, Any]:
    """All rows in their order, read from row groups of three."""
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "a.parquet", row_group_size=3)
    options = {"batch_size": table.num_rows, "shuffle": False, "remainder": "partial", **options}
    (batch,) = ParquetReader(folder, columns, **options)
    return batch


def test_times_are_counts_of_their_unit(tmp_path: Path) -> None:
    moments = [dt.datetime(1970, 1, 2), dt.datetime(1969, 12, 31, 23, 59, 59, 999999)]  # noqa: DTZ001
    table = pa.table(
        {
            "us": pa.array(moments, pa.timestamp("us")),
            "ns": pa.array(moments, pa.timestamp("ns", "UTC")),
            "day": pa.array([dt.date(1970, 1, 11), dt.date(1969, 12, 31)]),
            "time": pa.array([dt.time(0, 0, 1), dt.time(1)], pa.time32("ms")),
            "span": pa.array([5, -7], pa.duration("ms")),
        }
    )
    batch = one_batch(tmp_path, table)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "us": [86_400_000_000, -1],
        "ns": [86_400_000_000_000, -1000],
        "day": [10, -1],
        "time": [1000, 3_600_000],
        "span": [5, -7],
    }
    assert {values.dtype for values in batch.values()} == {torch.int64}


def test_files_with_other_units_come_in_the_finer_one(tmp_path: Path) -> None:
    for name, unit in (("a", "ms"), ("b", "us")):
        table = pa.table({"t": pa.array([dt.datetime(1970, 1, 1, 0, 0, 2)], pa.timestamp(unit))})  # noqa: DTZ001
        pq.write_table(table, tmp_path / f"{name}.parquet")
    reader = ParquetReader(tmp_path, batch_size=2)
    assert reader.schema["t"] == Column("t", ColumnKind.TIME, "int64", unit="us")
    assert next(iter(reader))["t"].tolist() == [2_000_000, 2_000_000]


def test_decimals_are_float64(tmp_path: Path) -> None:
    values = [decimal.Decimal("1.25"), decimal.Decimal("-99999999.75"), decimal.Decimal("0")]
    batch = one_batch(tmp_path, pa.table({"d": pa.array(values, pa.decimal128(20, 2))}))
    assert batch["d"].dtype == torch.float64
    assert batch["d"].tolist() == [1.25, -99999999.75, 0.0]


def test_lists_take_their_declared_shape(tmp_path: Path) -> None:
    values = np.arange(5 * 12, dtype=np.float32).reshape(5, 12)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 12)
    table = pa.table(
        {"fixed": fixed, "lists": [row.tolist() for row in values], "nested": values.reshape(5, 3, 4).tolist()}
    )
    batch = one_batch(tmp_path, table, shapes={"fixed": (3, 4), "lists": (2, 2, 3), "nested": (3, 4)})
    assert np.array_equal(batch["fixed"], values.reshape(5, 3, 4))
    assert np.array_equal(batch["lists"], values.reshape(5, 2, 2, 3))
    assert np.array_equal(batch["nested"], values.reshape(5, 3, 4))


@pytest.mark.parametrize("shape", [(6,), (3, 2), (1, 2, 3)])
@pytest.mark.parametrize("kind", [None, pa.list_(pa.list_(pa.float64(), 3), 2), pa.large_list(pa.list_(pa.int16()))])
def test_nested_lists_take_a_declared_shape_of_as_many_elements(tmp_path: Path, shape: Any, kind: Any) -> None:
    values = np.arange(30).reshape(5, 2, 3)
    table = pa.table({"x": pa.array(values.tolist(), kind)})
    assert np.array_equal(one_batch(tmp_path, table, shapes={"x": shape})["x"], values.reshape(5, *shape))
    with pytest.raises(DataError, match="'x' holds lists of different lengths, 8 and 6"):
        one_batch(tmp_path, table, shapes={"x": (4, 2)})


def test_nested_lists_of_other_lengths_and_with_nulls_do_not_take_a_shape(tmp_path: Path) -> None:
    for rows, message in (
        ([[[1], [2, 3, 4]], [[1, 2], [3, 4]]], "different lengths, 1 and 3"),
        ([[[1, 2], [3, 4]], [[1, 2], None]], "1 null inside its lists"),
        ([[[1, 2], [3, 4]], None], "holds 1 null"),
    ):
        with pytest.raises(DataError, match=message):
            one_batch(tmp_path, pa.table({"x": rows}), shapes={"x": (4,)})


def test_lists_without_a_declared_shape_have_the_length_of_the_first(tmp_path: Path) -> None:
    table = pa.table({"l": [[1, 2], [3, 4], [5, 6], [7, 8]], "v": vectors([[1.0, 2.0, 3.0]] * 4)})
    batch = one_batch(tmp_path, table)
    assert batch["l"].shape == (4, 2)
    assert batch["v"].shape == (4, 3)
    with pytest.raises(DataError, match="(?s)row group 1 of .*'l' holds lists of different lengths, 2 and 1") as caught:
        one_batch(tmp_path, pa.table({"l": [[1, 2], [3, 4], [5, 6], [7]]}))
    assert "pad or cut" in str(caught.value)


@pytest.mark.parametrize("row_group_size", [40, 1000])
def test_lists_have_the_length_of_the_rows_that_a_filter_lets_through(tmp_path: Path, row_group_size: int) -> None:
    table = pa.table({"kind": ["a"] * 100 + ["b"] * 5, "x": [[1.0, 2.0]] * 100 + [[1.0, 2.0, 3.0]] * 5})
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=row_group_size)
    for kind, length in (("a", 2), ("b", 3)):
        reader = ParquetReader(tmp_path, ["x"], batch_size=2, filters=[("kind", "==", kind)])
        assert reader.schema["x"].shape == (length,)
        assert {batch["x"].shape[1] for batch in reader} == {length}


@pytest.mark.parametrize("options", [{"drop_nulls": True}, {"filters": [("x", "is valid")]}])
def test_every_batch_of_lists_has_their_length_where_the_first_rows_are_null(tmp_path: Path, options: Any) -> None:
    pq.write_table(pa.table({"x": pa.array([None] * 100 + [[1.0, 2.0]] * 5)}), tmp_path / "data.parquet")
    shapes = []
    for rank in range(2):
        reader = ParquetReader(tmp_path, ["x"], batch_size=2, rank=rank, size=2, remainder="partial", **options)
        assert reader.schema["x"].shape == (2,)
        shapes += [tuple(batch["x"].shape) for batch in reader]
    assert sorted(shapes) == [(0, 2), (1, 2), (2, 2), (2, 2)]


def vectors(rows: list[Any]) -> pa.Array:
    """Dense vectors of lists, sparse ones of (size, indices, values)."""
    dicts = [
        {"type": 0, "size": row[0], "indices": row[1], "values": row[2]}
        if isinstance(row, tuple)
        else {"type": 1, "size": None, "indices": None, "values": row}
        for row in rows
    ]
    return pa.array(dicts, vector_type())


def test_spark_vectors_are_dense_tensors(tmp_path: Path) -> None:
    batch = one_batch(
        tmp_path, pa.table({"v": vectors([[1.0, 2.0, 3.0], (3, [2], [5.0]), (3, [], []), [4.0, 5.0, 6.0]])})
    )
    assert batch["v"].tolist() == [[1, 2, 3], [0, 0, 5], [0, 0, 0], [4, 5, 6]]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(lists=st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=10), length=st.integers(1, 5))
def test_padding_is_what_python_does_row_by_row(lists: list[list[int]], length: int) -> None:
    flat = np.array([value for one in lists for value in one], dtype=np.int64)
    lengths = np.array([len(one) for one in lists])
    expected = [(one + [-1] * length)[:length] for one in lists]
    assert padded(flat, lengths, length, -1).tolist() == expected


def test_ragged_lists_are_padded_and_cut_to_the_declared_length(tmp_path: Path) -> None:
    lists: Any = [[1, 2, 3, 4], [], [5], None, [6, None]]
    table = pa.table({"t": pa.array(lists, pa.list_(pa.int32()))})
    batch = one_batch(tmp_path, table, shapes={"t": (3,)}, pad={"t": -1}, fill_nulls={"t": 9})
    assert batch["t"].dtype == torch.int32
    assert batch["t"].tolist() == [[1, 2, 3], [-1, -1, -1], [5, -1, -1], [9, 9, 9], [6, 9, -1]]


ELEMENTS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.bool_()),
    pytest.param(pa.float16(), marks=pytest.mark.needs("pyarrow>=16")),
    *(pa.float32(), pa.float64(), pa.decimal128(10, 2), pa.decimal256(40, 2)),
]


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_lists_of_every_element_type_are_padded_and_filled(tmp_path: Path, element: Any) -> None:
    one, zero = pa.scalar(1).cast(pa.int8()).cast(element).as_py(), pa.scalar(0).cast(pa.int8()).cast(element).as_py()
    rows: Any = [[one, zero, one], [one], None, [one, None]]
    table = pa.table({"whole": pa.array(rows[:1] * 4, pa.list_(element)), "l": pa.array(rows, pa.list_(element))})
    shapes = {"l": (2,), "whole": (3,)}
    padded = one_batch(tmp_path, table.slice(0, 2), shapes=shapes, pad={"l": zero})
    assert padded["l"].tolist() == [[1, 0], [1, 0]]
    both = one_batch(tmp_path, table, shapes=shapes, pad={"l": zero}, fill_nulls={"l": one})
    assert both["l"].tolist() == [[1, 0], [1, 0], [1, 1], [1, 1]]
    assert both["whole"].tolist() == [[1, 0, 1]] * 4
    assert both["l"].dtype == both["whole"].dtype == padded["l"].dtype


@pytest.mark.needs("pyarrow>=26")  # older ones do not read what they write
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_null_lists_of_a_fixed_size_are_filled(tmp_path: Path, element: Any) -> None:
    one, zero = pa.scalar(1).cast(pa.int8()).cast(element).as_py(), pa.scalar(0).cast(pa.int8()).cast(element).as_py()
    table = pa.table({"l": pa.array([[one, one], None], pa.list_(element, 2))})
    assert one_batch(tmp_path, table, fill_nulls={"l": zero})["l"].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("element", "value"),
    [(pa.int32(), 0.5), (pa.int32(), float("nan")), (pa.int8(), 1000), (pa.int64(), 1 << 70), (pa.int64(), None)],
    ids=str,
)
def test_a_value_for_padding_that_the_elements_cannot_hold_is_named(tmp_path: Path, element: Any, value: Any) -> None:
    table = pa.table({"l": pa.array([[1, 2], [3]], pa.list_(element))})
    with pytest.raises(DataError, match=rf"(?s)row group 0 of .*pad gives column 'l' of {element} the value"):
        one_batch(tmp_path, table, shapes={"l": (2,)}, pad={"l": value})
    if value is not None:
        with pytest.raises(DataError, match=rf"fill_nulls gives column 'l' of {element} the value"):
            one_batch(tmp_path, table, shapes={"l": (2,)}, pad={"l": 0}, fill_nulls={"l": value})


def test_values_for_padding_that_fit_are_what_stands_there(tmp_path: Path) -> None:
    for element, one, value in ((pa.int16(), 1, -1), (pa.float32(), 1, float("nan")), (pa.bool_(), True, False)):
        table = pa.table({"l": pa.array([[one], [one]], pa.list_(element))})
        batch = one_batch(tmp_path, table, shapes={"l": (2,)}, pad={"l": value})
        assert np.array_equal(batch["l"].numpy(), [[one, value]] * 2, equal_nan=element == pa.float32())


def test_nulls_are_an_error_a_value_or_a_row_that_is_left_out(tmp_path: Path) -> None:
    table = pa.table(
        {"x": [0.5, None, 2.5, None, 4.5, 5.5, 6.5], "k": [0, 1, None, 3, 4, 5, 6], "b": [True, None] * 3 + [False]}
    )
    with pytest.raises(DataError, match="'x' holds 1 null") as caught:
        one_batch(tmp_path, table)
    assert "row group 0 of" in str(caught.value)
    filled = one_batch(tmp_path, table, fill_nulls={"x": -1, "k": 7, "b": True})
    assert filled["x"].tolist() == [0.5, -1, 2.5, -1, 4.5, 5.5, 6.5]
    assert filled["k"].tolist() == [0, 1, 7, 3, 4, 5, 6]
    assert filled["b"].tolist() == [True] * 6 + [False]
    assert one_batch(tmp_path, table, drop_nulls=True)["k"].tolist() == [0, 4, 6]
    assert one_batch(tmp_path, table, ["x", "k"], drop_nulls=["x"], fill_nulls={"k": 7})["k"].tolist() == [
        0,
        7,
        4,
        5,
        6,
    ]


def test_spark_vectors_are_laid_out_in_a_declared_shape(tmp_path: Path) -> None:
    rows = vectors([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (6, [2], [5.0]), (6, [], [])])
    for chosen in (rows, rows.slice(0, 1), rows.slice(1)):
        batch = one_batch(tmp_path, pa.table({"v": chosen}), shapes={"v": (2, 3)})
        flat = one_batch(tmp_path, pa.table({"v": chosen}))
        assert batch["v"].shape == (len(chosen), 2, 3)
        assert torch.equal(batch["v"].reshape(-1, 6), flat["v"])
    with pytest.raises(DataError, match=r"lists of different lengths, 8 and 6"):
        one_batch(tmp_path, pa.table({"v": rows}), shapes={"v": (2, 4)})


def test_nulls_in_vectors_and_lists_leave_out_the_row(tmp_path: Path) -> None:
    rows = vectors([[1.0, 2.0]] * 4).to_pylist()
    table = pa.table(
        {
            "v": pa.array([rows[0], None, rows[2], rows[3]], vector_type()),
            "l": pa.array([[1, 2], [3, 4], None, [5, 6]], pa.list_(pa.int64())),
        }
    )
    batch = one_batch(tmp_path, table, drop_nulls=True)
    assert batch["l"].tolist() == [[1, 2], [5, 6]]
    assert batch["v"].shape == (2, 2)


@pytest.mark.needs("pyarrow>=15")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(("size", "shuffle"), [(1, True), (2, True), (2, False)])
def test_numbers_are_gathered_from_several_row_groups_as_they_are(
    tmp_path: Path, files: int, size: int, shuffle: bool, cached: bool
) -> None:
    random = np.random.default_rng(0)
    names = ["int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"]
    values = {name: random.integers(0, 100, 60).astype(name) for name in names}
    columns = {"id": range(60), **values, "bool": values["int8"] > 50, "filled": [*[None, 1.0] * 30]}
    for number in range(files):
        part = pa.table(columns).slice(number * 60 // files, 60 // files)
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=7)
    cache = MemoryCache(1 << 20) if cached else None
    seen = []
    for rank in range(size):
        options = {"rank": rank, "size": size, "remainder": "partial", "fill_nulls": {"filled": 0.0}}
        reader = ParquetReader(tmp_path, batch_size=9, cache=cache, lanes=1, shuffle=shuffle, **options)
        for batch in (batch for epoch in range(2) for batch in reader.epoch(epoch)):
            ids = batch["id"].numpy().copy()
            seen.append(ids)
            for name, expected in {**values, "bool": columns["bool"], "filled": np.array([0.0, 1.0] * 30)}.items():
                assert batch[name].numpy().dtype == expected.dtype
                assert np.array_equal(batch[name].numpy(), expected[ids])
                batch[name].zero_()  # nobody else's memory
    assert sorted(np.concatenate(seen)) == sorted([*range(60)] * 2)


# --- decode functions -----------------------------------------------------------------------------------------------


def images(count: int) -> tuple[list[bytes], Any]:
    arrays = np.random.default_rng(0).integers(0, 256, (count, 4, 5, 3), dtype=np.uint8)
    packed = []
    for array in arrays:
        stream = io.BytesIO()
        np.save(stream, array)
        packed.append(stream.getvalue())
    return packed, arrays


def load(data: bytes) -> Any:
    return np.load(io.BytesIO(data))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_decode_function_makes_tensors_of_binary_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool, cached: bool, chunk_bytes: int
) -> None:
    monkeypatch.setattr(budget, "CHUNK_BYTES", chunk_bytes)
    packed, arrays = images(20)
    table = pa.table({"id": range(20), "image": packed, "name": [f"n{i}" for i in range(20)]})
    decode = {"image": load, "name": lambda text: int(text[1:])}
    cache = MemoryCache(1 << 20) if cached else None
    for _ in range(2):
        batch = one_batch(tmp_path, table, decode=decode, shuffle=shuffle, window_bytes=500, cache=cache)
        ids = batch["id"]
        assert torch.equal(batch["name"], ids)
        assert torch.equal(batch["image"], torch.from_numpy(arrays)[ids])


def test_decode_functions_see_the_rows_of_their_rank_only(tmp_path: Path) -> None:
    pq.write_table(pa.table({"s": [str(i) for i in range(40)]}), tmp_path / "a.parquet")
    seen: list[int] = []

    def decode(text: str) -> int:
        seen.append(int(text))
        return int(text)

    for rank in range(2):
        reader = ParquetReader(tmp_path, batch_size=5, rank=rank, size=2, decode={"s": decode})
        assert reader.schema["s"] == Column("s", ColumnKind.NUMERIC, "int64")
        seen.remove(0)  # the first row, to learn the schema
        assert len(list(reader)) == 4
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("arrow_type", [pa.binary(), pa.large_binary(), pa.binary(12)], ids=str)
def test_raw_tensors_are_decoded_whole_columns_at_once(tmp_path: Path, arrow_type: Any) -> None:
    values = np.random.default_rng(1).standard_normal((10, 3)).astype("<f4")
    table = pa.table({"id": range(10), "x": pa.array([row.tobytes() for row in values], arrow_type)})
    for shuffle in (False, True):
        batch = one_batch(tmp_path, table, decode={"x": RawTensor("float32", (3,))}, shuffle=shuffle)
        assert np.array_equal(batch["x"], values[batch["id"].numpy()])
        batch["x"].zero_()  # nobody else's memory
    with pytest.raises(
        DataError,
        match=r"'x' holds a value of 12 bytes in row 0 of row group 0 of .*, but float32 of shape \(4,\) takes 16",
    ):
        one_batch(tmp_path, table, decode={"x": RawTensor("float32", (4,))}, batch_size=5)


def test_raw_integers_that_no_tensor_holds_are_refused(tmp_path: Path) -> None:
    for largest in (2**63 - 1, 2**63):
        values = [np.array([1, value], "<u8").tobytes() for value in (2, 3, 4, largest)]
        options: dict[str, Any] = {"decode": {"x": RawTensor("uint64", (2,))}}
        if largest < 2**63:
            assert one_batch(tmp_path, pa.table({"x": values}), **options)["x"][3].tolist() == [1, largest]
            continue
        with pytest.raises(DataError, match="'x' holds an integer in row 0 of row group 1 .* int64 cannot hold"):
            one_batch(tmp_path, pa.table({"x": values}), **options)


def test_decoded_values_reach_the_transformation(tmp_path: Path) -> None:
    packed, arrays = images(6)
    table = pa.table({"id": range(6), "image": packed})
    batch = one_batch(
        tmp_path,
        table,
        decode={"image": load},
        transformation_fn=lambda row: {"id": row["id"], "mean": row["image"].astype("f8").mean()},
    )
    assert np.allclose(batch["mean"], arrays.reshape(6, -1).mean(1))


class LetDown:
    """Fails on each value a few times, as np.load does where another thread parses Python text too (gh-106905)."""

    def __init__(self, function: Any, failures: int, text: str = "AST constructor recursion depth mismatch") -> None:
        self._function = function
        self._failures = failures
        self._text = text
        self._of_thread = threading.local()  # the reader calls it in several; a value is tried again where it failed

    def __call__(self, value: Any) -> Any:
        self._of_thread.calls = calls = getattr(self._of_thread, "calls", 0) + 1
        result = self._function(value)
        if calls % (self._failures + 1):
            raise SystemError(f"{self._text} (before=27, after=24)")
        return result


def test_functions_that_the_interpreter_lets_down_are_called_again(tmp_path: Path) -> None:
    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        row["x"] *= 2  # in its own row: called again, it must find the row as it was
        return {"x": row["x"], "name": row["name"]}

    table = pa.table({"x": [[float(i), 1.0] for i in range(6)], "name": [str(i) for i in range(6)]})
    decode, transform = LetDown(int, 2), LetDown(doubled, 2)
    batch = one_batch(tmp_path, table, decode={"name": decode}, transformation_fn=transform)
    assert batch["name"].tolist() == list(range(6))
    assert batch["x"].tolist() == [[2.0 * i, 2.0] for i in range(6)]


@pytest.mark.parametrize("decoded", [True, False])
@pytest.mark.parametrize(
    ("text", "calls"), [("AST constructor recursion depth mismatch", 3), ("error return without exception set", 1)]
)
def test_a_function_that_fails_each_time_is_not_called_forever(
    tmp_path: Path, text: str, calls: int, decoded: bool
) -> None:
    called: list[Any] = []
    function = LetDown(called.append, 1_000, text)
    options: dict[str, Any] = {"decode": {"name": function}} if decoded else {"transformation_fn": function}
    with pytest.raises(DataError, match=f"row 0 of .*SystemError: {text}"):
        one_batch(tmp_path, pa.table({"name": ["1"]}), **options)
    assert len(called) == calls


def test_a_null_that_comes_first_is_named_and_not_passed_to_the_function(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'s' holds 1 null in row 0 of .*fill_nulls="):
        one_batch(tmp_path, pa.table({"s": [None, "4"]}), decode={"s": int})


@pytest.mark.skipif(not hasattr(pa, "string_view"), reason="this pyarrow has no string_view")
@pytest.mark.parametrize("kind", ["string_view", "binary_view"])
def test_nulls_among_views_of_text_are_filled_before_they_are_decoded(tmp_path: Path, kind: str) -> None:
    one, seven = ("1", "7") if kind == "string_view" else (b"1", b"7")
    table = pa.table({"s": pa.array([one, None, one, one], getattr(pa, kind)())})
    batch = one_batch(tmp_path, table, decode={"s": int}, fill_nulls={"s": seven})
    assert batch["s"].tolist() == [1, 7, 1, 1]


def test_columns_of_any_type_can_be_decoded(tmp_path: Path) -> None:
    table = pa.table({"s": [{"a": i, "b": "x"} for i in range(5)], "l": [["a"] * i for i in range(5)]})
    with pytest.raises(DataError, match="(?s)'s' has the type struct.*'l' has the type list<"):
        one_batch(tmp_path, table)
    batch = one_batch(tmp_path, table, decode={"s": lambda value: value["a"], "l": len})
    assert batch["s"].tolist() == batch["l"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (lambda text: int(text) // (int(text) - 4), "failed on row 1 of row group 1 of .*ZeroDivisionError"),
        (lambda text: np.zeros(2 if text == "4" else 1), r"shape \(2,\).*row 1 of row group 1 of .*shape \(1,\)"),
        (lambda text: 0.5 if text == "4" else 1, "dtype float64.*dtype int64 for the first row"),
        (lambda text: text, "the decode function returned str in column 's'"),
        (lambda text: np.uint64(2**63 + int(text) - 4), "integer in column 's' for row 1 of row .* that int64"),
    ],
    ids=["raises", "shape", "dtype", "text", "uint64"],
)
def test_a_value_that_does_not_fit_is_named_with_its_row(tmp_path: Path, decode: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"(?s){message}"):
        one_batch(tmp_path, pa.table({"s": [str(i) for i in range(9)]}), decode={"s": decode})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"shapes": {"zzz": (1,)}}, "shapes names the column 'zzz', which is not read"),
        ({"shapes": {"x": (2,)}}, "'x', which holds numeric, the shape"),
        ({"pad": {"l": 0}}, r"shapes={'l': \(128,\)}"),
        ({"pad": {"x": 0}, "fill_nulls": {"l": 0}}, "(?s)pad names column 'x'.*fill_nulls names column 'l'"),
    ],
)
def test_rules_that_do_not_fit_their_column_are_refused(tmp_path: Path, rules: Any, message: str) -> None:
    table = pa.table({"x": [1.0] * 4, "l": [[1, 2]] * 4})
    with pytest.raises(DataError, match=message):
        one_batch(tmp_path, table, **rules)


def test_a_value_for_nulls_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fill_nulls gives column 'x' of int64 the value 'many'"):
        one_batch(tmp_path, pa.table({"x": [1, None]}), fill_nulls={"x": "many"})
    prices = pa.table({"d": pa.array([None, decimal.Decimal("1.50")], pa.decimal128(10, 2))})
    assert one_batch(tmp_path, prices, fill_nulls={"d": 0.25})["d"].tolist() == [0.25, 1.5]
    with pytest.raises(DataError, match=r"fill_nulls gives column 'd' of decimal128\(10, 2\) the value 0.001"):
        one_batch(tmp_path, prices, fill_nulls={"d": 0.001})


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"lanes": 2}, {"window_bytes": 400}, {"function": True}])
def test_columns_in_one_tensor_hold_what_they_hold_apart(tmp_path: Path, options: Any) -> None:
    table = pa.table({"a": np.arange(50.0), "n": range(50), "b": np.arange(50.0) / 2, "c": -np.arange(50.0)})
    for part in range(2):
        pq.write_table(table.slice(25 * part, 25), tmp_path / f"{part}.parquet", row_group_size=10)
    if options.pop("function", False):
        options = {"transformation_fn": lambda row: {**row, "a": row["a"] + 1}}
    options = {"batch_size": 8, "seed": 3, "remainder": "partial", **options}
    apart = ParquetReader(tmp_path, **options)
    together = ParquetReader(tmp_path, stack={"x": ["c", "a"]}, **options)
    assert [(column.name, column.shape) for column in together.schema] == [("x", (2,)), ("n", ()), ("b", ())]
    for batch, expected in zip(together, apart, strict=True):
        assert list(batch) == ["x", "n", "b"]
        assert torch.equal(batch["x"], torch.stack([expected["c"], expected["a"]], 1))
        assert torch.equal(batch["n"], expected["n"])


def test_columns_that_do_not_make_one_tensor_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.0], "n": [1], "b": [2.0]}), tmp_path / "a.parquet")
    for stack, text in [
        ({"x": ["a", "n"]}, r"holds 'a' of float64 \(\), 'n' of int64 \(\): give columns of one dtype and shape"),
        ({"x": []}, "holds no columns"),
        ({"x": ["a", "a"]}, "each once"),
        ({"x": ["a"], "y": ["a", "b"]}, "each once"),
        ({"n": ["a", "b"]}, "'n' is the name of another column"),
        ({"x": ["z"]}, "z"),
    ]:
        with pytest.raises(DataError, match=text):
            ParquetReader(tmp_path, batch_size=1, stack=stack)
