"""A function over batches: what it gets, what it may return, and batches that go through it in the reader."""

from __future__ import annotations

import datetime as dt
import decimal
import posixpath
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data.columns.raw_arrays import raw_array
from hvd_cluster.data.columns.vectors import from_matrix
from hvd_cluster.data.preprocessing import AllRowsFailedError, Preprocess, RowFailedError
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.errors import DataError

pytestmark = pytest.mark.fast


def column(values: list[Any], arrow_type: Any = None) -> Any:
    return raw_array(pa.chunked_array([pa.array(values, arrow_type)]))


def test_each_type_comes_as_the_array_that_numpy_users_expect() -> None:
    assert column([1, 2], pa.int32()).dtype == np.int32
    assert column([1.5, None], pa.float32()).dtype == np.float32
    assert np.array_equal(column([1, None]), [1.0, np.nan], equal_nan=True)
    assert column([True, False]).dtype == np.bool_
    assert np.array_equal(column([True, None, False]), [1.0, np.nan, 0.0], equal_nan=True)
    assert column(["a", None]).tolist() == ["a", None]
    assert column(["a", "a"]).dtype == object
    assert column([b"\x00", b""]).tolist() == [b"\x00", b""]
    assert column([decimal.Decimal("1.25"), None]).tolist()[0] == 1.25
    assert column([{"a": 1}, None]).tolist() == [{"a": 1}, None]
    assert column([None, None]).tolist() == [None, None]
    assert column([dt.date(2024, 1, 2), None]).astype(str).tolist() == ["2024-01-02", "NaT"]
    assert raw_array(pa.chunked_array([pa.array(["x", "y"]).dictionary_encode()])).tolist() == ["x", "y"]
    assert raw_array(pa.chunked_array([], pa.string())).tolist() == []


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_moments_have_one_unit_whatever_the_column_has(unit: str) -> None:
    moment = dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.timezone.utc)
    found = column([moment, None], pa.timestamp(unit, "UTC"))
    assert found.dtype == np.dtype("datetime64[us]")
    assert found.astype(str).tolist() == ["2024-05-06T07:08:09.000000", "NaT"]


def test_lists_of_one_length_are_a_matrix_and_others_an_array_each() -> None:
    assert column([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    ragged = column([[1, 2], [3], None])
    assert [None if row is None else np.asarray(row).tolist() for row in ragged] == [[1, 2], [3], None]
    assert [row.dtype for row in column([[1, 2], [3]])] == [np.int64, np.int64]
    assert column([["a", "b"], ["c", "d"]]).tolist() == [["a", "b"], ["c", "d"]]
    assert column([["a", "b"], ["c", "d"]]).shape == (2,)


@pytest.mark.parametrize("arrow_type", [pa.list_(pa.float64()), pa.large_list(pa.float64()), pa.list_(pa.float64(), 2)])
def test_nulls_leave_lists_in_the_form_that_they_have_without(arrow_type: Any) -> None:
    inner = column([[1.0, 2.0], [None, 3.0]], arrow_type)
    assert np.array_equal(inner, [[1.0, 2.0], [np.nan, 3.0]], equal_nan=True)
    first, null, last = column([[1.0, 2.0], None, [3.0, 4.0]], arrow_type)
    assert isinstance(first, np.ndarray)
    assert (first.tolist(), null, last.tolist()) == ([1.0, 2.0], None, [3.0, 4.0])


def test_lists_of_lists_are_arrays_at_each_level() -> None:
    nested = pa.list_(pa.list_(pa.int16()))
    assert column([[[1, 2]], [[3, 4]]], nested).shape == (2, 1, 2)
    assert column([], nested).shape[0] == 0
    assert np.array_equal(column([[[1, None]], [[3, 4]]], nested), [[[1, np.nan]], [[3, 4]]], equal_nan=True)
    first, second, null = column([[[1, 2]], [[3, 4], [5, 6]], None], nested)
    assert (first.tolist(), second.tolist(), null) == ([[1, 2]], [[3, 4], [5, 6]], None)


def test_vectors_are_arrays_beside_nulls_and_vectors_of_other_lengths() -> None:
    matrix = from_matrix(np.arange(4.0).reshape(2, 2))
    first, second, null = raw_array(pa.chunked_array([matrix, pa.nulls(1, matrix.type)]))
    assert (first.tolist(), second.tolist(), null) == ([0.0, 1.0], [2.0, 3.0], None)
    *_, third = raw_array(pa.chunked_array([matrix, from_matrix(np.ones((1, 3)))]))
    assert third.tolist() == [1.0, 1.0, 1.0]


def test_whole_numbers_keep_their_type_and_all_digits() -> None:
    large = [2**53 + 1, None]
    assert column(large).tolist() == large
    assert column([[2**60 + 1, 2], [None, 3]], pa.list_(pa.int64())).tolist() == [[2**60 + 1, 2], [None, 3]]
    assert column([2**64 - 1], pa.uint64()).tolist() == [2**64 - 1]
    for width in (8, 16, 32, 64):
        assert column([1], f"uint{width}").dtype == f"uint{width}"
        assert column([[1]], pa.list_(pa.type_for_alias(f"uint{width}"))).dtype == f"uint{width}"


def test_dates_are_days_whatever_the_column_counts() -> None:
    assert column([dt.date(2024, 1, 2), None], pa.date64()).dtype == np.dtype("datetime64[D]")


def test_writing_to_a_column_does_not_change_the_data() -> None:
    table = pa.table({"x": [1.0, 2.0]})
    raw_array(table["x"])[:] = 0
    assert table["x"].to_pylist() == [1.0, 2.0]


def called(fn: Any, values: dict[str, list[Any]], **options: Any) -> Any:
    table = pa.table(values)
    made = Preprocess(fn=fn, columns=tuple(values), **options)
    return made(table, (0,), lambda row: f"row {row}")


def test_an_array_is_named_after_the_only_column() -> None:
    made, kept = called(lambda batch: np.ones((2, 3)), {"text": ["a", "b"]})
    assert (list(made), made["text"].shape, kept) == (["text"], (2, 3), None)
    made, _ = called(lambda batch: torch.ones(2, 3), {"a": [1, 2], "b": [1, 2]})
    assert list(made) == ["features"]


def test_what_it_returns_becomes_tensors() -> None:
    returned = {
        "lists": [[1, 2], [3, 4]],
        "arrays": [np.zeros(2), np.ones(2)],
        "tensors": [torch.zeros(2), torch.ones(2)],
        "narrow": [torch.zeros(2, dtype=torch.bfloat16)] * 2,
        "masked": np.ma.array([1.0, 2.0], mask=[False, False]),
        "objects": np.array([np.zeros(2), np.ones(3)[:2]], dtype=object),
        "wide": np.array([1, 2], dtype=np.uint16),
        "half": np.array([1, 2], dtype=np.float16),
        "arrow": pa.array([1, 2]),
        "graph": torch.ones(2, requires_grad=True) * 2,
    }
    made, _ = called(lambda batch: returned, {"x": [1, 2]})
    assert {name: (tuple(value.shape), value.dtype) for name, value in made.items()} == {
        "lists": ((2, 2), torch.int64),
        "arrays": ((2, 2), torch.float64),
        "tensors": ((2, 2), torch.float32),
        "narrow": ((2, 2), torch.bfloat16),
        "masked": ((2,), torch.float64),
        "objects": ((2, 2), torch.float64),
        "wide": ((2,), torch.int32),
        "half": ((2,), torch.float16),
        "arrow": ((2,), torch.int64),
        "graph": ((2,), torch.float32),
    }
    assert not made["graph"].requires_grad


def test_a_table_comes_and_goes_in_the_format_of_arrow() -> None:
    def fn(batch: pa.Table) -> pa.Table:
        assert isinstance(batch, pa.Table)
        return batch.append_column("y", pa.array([5, 6]))

    made, _ = called(fn, {"x": [1, 2]}, batch_format="pyarrow")
    assert {name: value.tolist() for name, value in made.items()} == {"x": [1, 2], "y": [5, 6]}


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "it returned None in 'x'"),
        ({"y": None}, "it returned None in 'y': return an array or a tensor, or leave the name out"),
        ({}, "it returned an empty dict"),
        ({1: [1, 2]}, "it returned the key 1: names are strings"),
        ([[1], [1, 2]], r"rows of different shapes in 'x', such as \(1,\) and \(2,\): pad or cut them"),
        ([1, 2, 3], r"it returned shape \(3,\) in 'x' for a batch of 2 row\(s\)"),
        (3.0, r"it returned shape \(\) in 'x'"),
        (["a", "b"], "it returned <U1 in 'x', of which no tensor can be made"),
        (np.array(["a", 1], dtype=object), "of which no tensor can be made"),
        (np.array(["2024-01-01"] * 2, dtype="datetime64[D]"), "count times"),
        (
            [torch.ones(1), torch.ones(2)],
            r"rows of different shapes in 'x', such as \(1,\) and \(2,\): pad or cut them",
        ),
        ([[[1, 2], [3]], [[1], [2]]], "rows of different shapes in 'x', or lists of different lengths within a row"),
        (np.ma.array([1, 2], mask=[False, True]), "a masked array in 'x': fill what is masked"),
        (np.array([1, 2**63 + 5], dtype=np.uint64), "it returned 9223372036854775813 in 'x', which int64 cannot hold"),
        (torch.eye(2).to_sparse(), "a sparse or nested tensor in 'x': return dense ones"),
        (torch.empty(2, device="meta"), "it returned a tensor on meta in 'x': return CPU tensors"),
    ],
)
def test_what_no_model_can_take_is_named(returned: Any, text: str) -> None:
    with pytest.raises(DataError, match=f"preprocess fail.* on .*{text}"):
        called(lambda batch: returned, {"x": [1, 2]})


def fails_on_three(batch: dict[str, Any]) -> Any:
    if 3 in batch["x"]:
        raise ValueError("three")
    return batch["x"] * 2


def test_the_row_on_which_it_fails_is_named() -> None:
    with pytest.raises(DataError, match="preprocess failed on row 2: ValueError: three") as caught:
        called(fails_on_three, {"x": [1, 2, 3, 4]})
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_fails_on_every_row_is_named_without_a_row_but_with_its_line() -> None:
    def fn(batch: dict[str, Any]) -> Any:
        return batch["label"]

    line = fn.__code__.co_firstlineno + 1
    text = rf"^preprocess fails on every row tried: KeyError: 'label' \(test_preprocessing\.py:{line}\); it gets the"
    with pytest.raises(DataError, match=text):
        called(fn, {"x": [1, 2, 3, 4]})
    with pytest.raises(RowFailedError, match="preprocess failed on row 0: KeyError"):
        called(fn, {"x": [1]})
    with pytest.raises(RowFailedError, match="preprocess failed on row 0: ValueError: three"):
        called(fails_on_three, {"x": [3, 4, 3]})


def test_a_failure_of_no_single_row_is_one_of_the_batch() -> None:
    def fn(batch: dict[str, Any]) -> Any:
        if len(batch["x"]) > 1:
            raise ValueError("too many")
        return batch["x"]

    with pytest.raises(DataError, match="preprocess failed on 3 rows from row 0 on: ValueError: too many"):
        called(fn, {"x": [1, 2, 3]}, on_error="skip")


@pytest.mark.parametrize("on_error", ["skip", "null"])
def test_rows_on_which_it_fails_are_left_out(on_error: Any) -> None:
    made, kept = called(fails_on_three, {"x": [1, 3, 4, 3]}, on_error=on_error)
    assert (made["x"].tolist(), kept.tolist()) == ([2, 8], [0, 2])
    failed = "preprocess failed on all 2 rows of a batch, from row 0 on: ValueError: three"
    with pytest.raises(AllRowsFailedError, match=failed):
        called(fails_on_three, {"x": [3, 3]}, on_error=on_error)


def test_rows_of_another_shape_are_left_out_or_named() -> None:
    def images(batch: Any) -> Any:
        return [None if side == 5 else np.ones((side, 2)) for side in batch["x"]]

    made, kept = called(images, {"x": [3, 4, 3, 5, 3]}, on_error="skip")
    assert (made["x"].shape, kept.tolist()) == ((3, 3, 2), [0, 2, 4])
    text = r"failed on row 1: it returned shape \(4, 2\) in 'x', and shape \(3, 2\) in 'x' for most other rows"
    with pytest.raises(DataError, match=text):
        called(images, {"x": [3, 4, 3]})
    with pytest.raises(DataError, match="failed on row 1: it returned values of type NoneType in 'x'"):
        called(images, {"x": [3, 5, 3]})


def test_what_it_returns_is_copied() -> None:
    buffer = np.zeros((8, 1))

    def same_memory(batch: Any) -> Any:
        buffer[: len(batch["x"])] = batch["x"][:, None]
        return buffer[: len(batch["x"])]

    (first, _), (second, _) = (called(same_memory, {"x": [value]}) for value in (1, 2))
    assert (first["x"].item(), second["x"].item()) == (1, 2)
    table = pa.table({"x": [1.0, 2.0]})
    made, _ = Preprocess(fn=lambda rows: rows["x"].to_numpy(), columns=("x",), batch_format="pyarrow")(table, (0,), str)
    made["x"] *= 2
    assert table["x"].to_pylist() == [1.0, 2.0]


def test_names_other_than_those_of_the_trial_are_refused() -> None:
    assert called(lambda batch: {"b": batch["x"], "a": batch["x"]}, {"x": [1]}, made=("a", "b"))
    with pytest.raises(DataError, match="it returned 'a', but 'a', 'b' for the rows that the model was tried on"):
        called(lambda batch: {"a": batch["x"]}, {"x": [1]}, made=("a", "b"))


def test_keywords_of_any_name_take_training_and_rng() -> None:
    made, _ = called(lambda batch, **more: np.full(1, sorted(more) == ["rng", "training"]), {"x": [1]})
    assert made["x"].item()


def test_threads_call_copies_of_a_function_with_a_state() -> None:
    lock = threading.Lock()
    counts = {"calls": 0}

    def counting(batch: Any) -> Any:
        counts["calls"] += 1
        return batch["x"]

    copy = Preprocess(fn=counting, columns=("x",)).copied()
    assert copy is not None
    copy.fn({"x": 1})
    assert counts == {"calls": 0}
    assert Preprocess(fn=lambda batch: lock, columns=("x",)).copied() is None
    # Functions of modules are not copied: this one uses nothing that threads may change, the other a list.
    assert Preprocess(fn=posixpath.basename, columns=("x",)).copied() is not None
    assert Preprocess(fn=shutil.get_archive_formats, columns=("x",)).copied() is None


def test_training_and_rng_are_passed_where_they_are_asked_for() -> None:
    def both(batch: Any, *, training: bool, rng: np.random.Generator) -> Any:
        return np.full(2, training) * rng.random(2)

    first, _ = called(both, {"x": [1, 2]}, training=True)
    again, _ = called(both, {"x": [1, 2]}, training=True)
    assert torch.equal(first["x"], again["x"])
    assert first["x"].all()
    scored, _ = called(both, {"x": [1, 2]})
    assert not scored["x"].any()


ROWS = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of raw columns, in row groups of different sizes; y is the number of the row."""
    path = tmp_path_factory.mktemp("raw")
    for number, group in enumerate((170, 300)):
        values = np.arange(number * ROWS // 2, (number + 1) * ROWS // 2)
        table = pa.table(
            {
                "text": [f"row {value}" if value % 7 else None for value in values],
                "struct": [{"a": int(value), "b": b"x"} for value in values],
                "list": [list(range(value % 3 + 1)) for value in values],
                "y": values.astype(np.float32),
            }
        )
        pq.write_table(table, path / f"{number}.parquet", row_group_size=group)
    return path


def numbers(batch: dict[str, Any], *, training: bool, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "n": np.array([-1 if text is None else int(text.split()[1]) for text in batch["text"]]),
        "a": [struct["a"] for struct in batch["struct"]],
        "length": [len(values) for values in batch["list"]],
        "drawn": rng.random(len(batch["text"])),
    }


RAW = Preprocess(fn=numbers, columns=("text", "struct", "list"), training=True)


@pytest.mark.parametrize("lanes", [1, 3])
def test_every_row_comes_through_the_function_with_its_own_label(folder: Path, lanes: int) -> None:
    seen = []
    for rank in range(2):
        options = {"batch_size": 64, "rank": rank, "size": 2, "remainder": "partial", "seed": 3, "lanes": lanes}
        plain = ParquetReader(folder, ["y"], **options)
        reader = ParquetReader(folder, [*RAW.columns, "y"], preprocess=RAW, **options)
        for batch, label in zip(reader.epoch(1), plain.epoch(1), strict=True):
            if len(label["y"]):
                y = batch["y"].long()
                assert list(batch) == ["n", "a", "length", "drawn", "y"]
                assert torch.equal(batch["y"], label["y"])  # the order does not depend on the function
                assert torch.equal(batch["a"], y)
                assert torch.equal(batch["length"], y % 3 + 1)
                assert torch.equal(batch["n"], torch.where(y % 7 == 0, -1, y))
            seen.append(label["y"])
    assert sorted(torch.cat(seen).tolist()) == list(range(ROWS))


def test_what_is_drawn_depends_on_seed_epoch_rank_and_row_only(folder: Path) -> None:
    def drawn(rank: int, epoch: int, start: int = 0, **options: Any) -> torch.Tensor:
        given = {"batch_size": 50, "rank": rank, "size": 2, "seed": 5, **options}
        reader = ParquetReader(folder, [*RAW.columns, "y"], preprocess=RAW, **given)
        return torch.cat([batch["drawn"] for batch in reader.epoch(epoch, start)])

    whole = drawn(0, 2)
    assert torch.equal(whole[350:], drawn(0, 2, start=7, num_threads=4))
    others = [drawn(1, 2), drawn(0, 3), drawn(0, 2, seed=6)]
    assert not any(torch.equal(whole, other) for other in others)


def test_a_function_that_does_not_return_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(batch: dict[str, Any]) -> Any:
        end_s = time.monotonic() + 60
        while threading.current_thread().name.startswith("hvd") and not caplog.messages and time.monotonic() < end_s:
            time.sleep(0.02)
        return batch["text"] == ""

    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2")
    preprocess = Preprocess(fn=fn, columns=("text",))
    list(ParquetReader(folder, ["text"], preprocess=preprocess, batch_size=100))
    assert caplog.messages[0].startswith("the next batch has not come for 0 s: hvd-preprocess_0 has been calling")
    assert "<locals>.fn (tests/data/test_preprocessing.py:" in caplog.messages[0]


def test_a_bad_row_is_named_by_file_and_row(folder: Path) -> None:
    def fn(batch: dict[str, Any]) -> Any:
        if any(struct["a"] == 1500 for struct in batch["struct"]):
            raise ValueError("not this one")
        return [struct["a"] for struct in batch["struct"]]

    options = {"columns": ["struct", "y"], "batch_size": 100, "remainder": "partial"}
    failing = ParquetReader(folder, preprocess=Preprocess(fn=fn, columns=("struct",)), **options)
    with pytest.raises(DataError, match=r"preprocess failed on row 200 of row group 1 of .*1\.parquet: ValueError"):
        list(failing)
    skipping = ParquetReader(folder, preprocess=Preprocess(fn=fn, columns=("struct",), on_error="skip"), **options)
    batches = list(skipping)
    assert sorted(len(batch["y"]) for batch in batches) == [99, *[100] * 19]
    assert sum(batch.num_left_out for batch in batches) == 1
    assert sorted(torch.cat([batch["struct"] for batch in batches]).tolist()) == [*range(1500), *range(1501, ROWS)]
    options |= {"batch_size": 1999, "remainder": "pad", "shuffle": False}  # the second batch is padding but for a row
    padded = list(ParquetReader(folder, preprocess=Preprocess(fn=fn, columns=("struct",), on_error="skip"), **options))
    assert [len(batch["y"]) for batch in padded] == [1998, 1998]
    assert [batch.num_left_out for batch in padded] == [1, 0]


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_of_bad_rows_has_a_good_one_in_training_and_no_rows_in_scoring(folder: Path, training: bool) -> None:
    def fn(batch: dict[str, Any]) -> Any:
        if any(struct["a"] < 70 for struct in batch["struct"]):
            raise ValueError("not these")
        return {"a": [struct["a"] for struct in batch["struct"]]}

    preprocess = Preprocess(fn=fn, columns=("struct",), on_error="skip", training=training)
    first, _, third, fourth, *_ = ParquetReader(
        folder, ["struct", "y"], batch_size=32, shuffle=False, preprocess=preprocess
    )
    good = [170] * 32 if training else []  # the beginning of the second row group
    assert (first["a"].tolist(), first["y"].tolist(), first.num_left_out) == (good, good, 32)
    assert (third["a"].tolist(), third.num_left_out) == (list(range(70, 96)), 6)
    assert fourth["a"].tolist() == list(range(96, 128))


@pytest.mark.parametrize("training", [True, False])
def test_a_good_row_is_found_wherever_it_is(folder: Path, training: bool) -> None:
    tried = []

    def fn(batch: dict[str, Any]) -> Any:
        tried.extend(struct["a"] for struct in batch["struct"])
        if any(not 1250 <= struct["a"] < 1290 for struct in batch["struct"]):
            raise ValueError("not these")
        return {"a": [struct["a"] for struct in batch["struct"]]}

    preprocess = Preprocess(fn=fn, columns=("struct",), on_error="skip", training=training)
    options = {"batch_size": 32, "shuffle": False, "preprocess": preprocess, "num_threads": 1}
    first, *others = ParquetReader(folder, ["struct", "y"], **options)
    assert first["a"].tolist() == first["y"].tolist() == ([1250] * 32 if training else [])
    assert sum(batch.num_left_out for batch in [first, *others]) == ROWS // 32 * 32 - 40
    assert tried.count(1000) <= 4  # in its batch, and once in the search

    class Never(Exception):
        pass

    def bad(batch: dict[str, Any]) -> Any:
        raise Never

    options["preprocess"] = Preprocess(fn=bad, columns=("struct",), on_error="skip", training=training)
    with pytest.raises(DataError, match="preprocess failed on all 32 rows of a batch"):
        list(ParquetReader(folder, ["struct", "y"], **options))


def test_a_name_of_another_column_is_refused(folder: Path) -> None:
    reader = ParquetReader(
        folder, ["text", "y"], batch_size=8, preprocess=Preprocess(fn=lambda b: {"y": [0] * 8}, columns=("text",))
    )
    with pytest.raises(DataError, match="preprocess returned 'y', which is another column's name"):
        next(iter(reader))


def test_it_takes_the_place_of_other_functions(folder: Path) -> None:
    with pytest.raises(DataError, match="preprocess takes the place of transformation_fn, decode and stack"):
        ParquetReader(folder, batch_size=8, preprocess=RAW, transformation_fn=dict)


def test_leaving_an_epoch_ends_its_threads(folder: Path) -> None:
    import threading

    before = threading.active_count()
    batches = ParquetReader(folder, [*RAW.columns, "y"], batch_size=8, preprocess=RAW).epoch(0)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before
