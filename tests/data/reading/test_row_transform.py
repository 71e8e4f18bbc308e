"""Rows for a user's function: what it is given for each kind of column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from hvd_cluster.data.columns.vectors import vector_type
from hvd_cluster.data.reading.row_transform import apply, rows
from hvd_cluster.data.schema import infer
from hvd_cluster.errors import DataError


def table() -> pa.Table:
    return pa.table(
        {
            "i": pa.array([1, 2], pa.int16()),
            "b": [True, False],
            "s": ["one", "two"],
            "y": [b"\x01", b"\x02\x03"],
            "l": [[1.0, 2.0], [3.0, 4.0]],
            "r": [[1], [2, 3]],
            "n": [[[1, 2]], [[3, 4]]],
            "v": pa.array([{"type": 0, "size": 2, "indices": [1], "values": [9.0]}] * 2, vector_type()),
            "c": pa.array(["x", "y"]).dictionary_encode(),
        }
    )


@pytest.mark.parametrize("pieces", [1, 2])
def test_each_kind_of_column_gives_its_kind_of_value(pieces: int) -> None:
    data = pa.concat_tables([table().slice(0, 1), table().slice(1)]) if pieces == 2 else table()
    first, second = rows(data, infer(data.schema))
    assert isinstance(first["i"], np.int16)
    assert (first["i"], second["i"]) == (1, 2)
    assert (first["b"], second["b"]) == (True, False)
    assert (first["s"], second["s"]) == ("one", "two")
    assert (first["y"], second["y"]) == (b"\x01", b"\x02\x03")
    assert (first["c"], second["c"]) == ("x", "y")
    assert second["l"].tolist() == [3.0, 4.0]
    assert (first["r"].tolist(), second["r"].tolist()) == ([1], [2, 3])
    assert second["n"].shape == (1, 2)
    assert first["v"].tolist() == [0.0, 9.0]


def test_what_comes_back_is_stacked_in_the_types_of_the_first_row() -> None:
    def transform(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "f": 0.5 if row["i"] == 1 else 1,
            "t": torch.ones(2, 3),
            "u": np.uint16(row["i"]),
            "len": len(row["y"]),
            "b": row["b"],
            "list": [1, 2],
        }

    tensors, schema = apply(transform, table(), infer(table().schema), None, "a test")
    assert schema.names == ("f", "t", "u", "len", "b", "list")
    assert tensors["f"].tolist() == [0.5, 1.0]
    assert tensors["t"].shape == (2, 2, 3)
    assert tensors["t"].dtype == torch.float32
    assert tensors["u"].dtype == torch.int32
    assert tensors["len"].tolist() == [1, 2]
    assert tensors["b"].dtype == torch.bool
    assert tensors["list"].tolist() == [[1, 2], [1, 2]]


def test_the_users_own_exception_is_the_cause() -> None:
    def transform(row: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("nope")

    with pytest.raises(DataError, match="failed on row 5 of a test: KeyError: 'nope'") as caught:
        apply(transform, table(), infer(table().schema), None, "a test", [5, 6])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("value", "message"),
    [("text", "returned str"), (None, "returned NoneType"), ([[1], [1, 2]], "returned list"), (1j, "returned complex")],
)
def test_what_no_tensor_can_be_made_of_is_named(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"{message} in column 'x' for row 0 of a test: no tensor can be made of it"):
        apply(lambda row: {"x": value}, table(), infer(table().schema), None, "a test")


@pytest.mark.parametrize(("first", "second"), [(np.int8(1), 300), (1, np.uint64(2**64 - 1)), ([np.int32(1)], [2**40])])
def test_integers_that_the_dtype_of_the_first_row_cannot_hold_are_refused(first: Any, second: Any) -> None:
    with pytest.raises(DataError, match="an integer in column 'x' for row 1 of a test that int.*cannot hold"):
        apply(lambda row: {"x": first if row["i"] == 1 else second}, table(), infer(table().schema), None, "a test")


@pytest.mark.parametrize(
    ("first", "second"), [(np.float32(1), 1e300), (np.float16(1), 70000), ([np.float32(1)], [-1e39])]
)
def test_numbers_that_would_become_infinite_in_the_dtype_of_the_first_row_are_refused(first: Any, second: Any) -> None:
    def transform(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": first if row["i"] == 1 else second}

    with pytest.raises(DataError, match="a number in column 'x' for row 1 of a test that float.*cannot hold"):
        apply(transform, table(), infer(table().schema), None, "a test")
    second = np.full_like(first, np.inf, dtype=np.float64)
    assert apply(transform, table(), infer(table().schema), None, "a test")[0]["x"].isinf().any()


def test_column_names_are_strings() -> None:
    with pytest.raises(DataError, match="the key 3"):
        apply(lambda row: {3: 1}, table(), infer(table().schema), None, "a test")


def test_nulls_do_not_reach_the_function() -> None:
    data = pa.table({"s": ["a", None]})
    with pytest.raises(DataError, match="'s' holds 1 null"):
        apply(lambda row: {"x": 1}, data, infer(data.schema), None, "a test")
