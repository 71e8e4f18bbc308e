"""What a petastorm reader does with the answers of a user's transform, and with nulls beside a predicate's column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import TransformSpec, make_batch_reader, make_reader
from hvd_cluster.petastorm.predicates import in_negate, in_pseudorandom_split
from hvd_cluster.petastorm.transform import edit_field


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Four rows."""
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "a.parquet")
    return str(tmp_path)


def test_a_null_leaves_the_other_integers_of_its_row_group_in_their_part_of_a_split(tmp_path: Path) -> None:
    keys = pa.array([*range(8), *range(7), None], pa.int64())
    pq.write_table(pa.table({"key": keys, "id": range(16)}), tmp_path / "a.parquet", row_group_size=8)
    for split in (in_pseudorandom_split([0.5, 0.5], 0, "key"), in_pseudorandom_split([0.5, 0.5], 1, "key")):
        for predicate in (split, in_negate(split)):
            with make_reader(tmp_path, predicate=predicate, shuffle_row_groups=False) as reader:
                by_row = [int(row.id) for row in reader]
            with make_batch_reader(tmp_path, predicate=predicate, shuffle_row_groups=False) as reader:
                assert [int(number) for batch in reader for number in batch.id] == by_row


@pytest.mark.parametrize("with_null", [False, True])
@pytest.mark.parametrize(
    "arrow_type",
    [
        pa.int32(),
        pa.uint8(),
        pa.bool_(),
        pa.float32(),
        pa.float64(),
        pa.decimal128(7, 2),
        pa.string(),
        pa.binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.date32(),
        pa.timestamp("ms"),
        pa.timestamp("ns"),
        pa.timestamp("us", "UTC"),
    ],
    ids=str,
)
def test_both_readers_split_the_same_rows(tmp_path: Path, arrow_type: Any, with_null: bool) -> None:
    numbers: list[Any] = [row % 2 == 0 if arrow_type == pa.bool_() else row for row in range(24)]
    if pa.types.is_floating(arrow_type):
        numbers = [row / 10 for row in numbers]
    elif pa.types.is_string(arrow_type) or pa.types.is_dictionary(arrow_type):
        numbers = list(map(str, numbers))
    elif pa.types.is_binary(arrow_type):
        numbers = [bytes([row]) for row in numbers]
    value_type = arrow_type.value_type if pa.types.is_dictionary(arrow_type) else arrow_type
    keys = pa.array([*numbers[1:], None] if with_null else numbers, value_type)
    table = pa.table({"key": keys.dictionary_encode() if value_type != arrow_type else keys, "id": range(24)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8)
    predicate = in_pseudorandom_split([0.5, 0.5], 0, "key")
    with make_reader(tmp_path, predicate=predicate, shuffle_row_groups=False) as reader:
        by_row = [int(row.id) for row in reader]
    with make_batch_reader(tmp_path, predicate=predicate, shuffle_row_groups=False) as reader:
        assert [int(number) for batch in reader for number in batch.id] == by_row


def test_a_transform_of_rows_may_return_a_series(url: str) -> None:
    with make_reader(url, transform_spec=TransformSpec(pd.Series), shuffle_row_groups=False) as reader:
        assert [int(row.id) for row in reader] == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_transform_that_returns_nothing_is_named(url: str, make: Any) -> None:
    def in_place(given: Any) -> None:
        given["id"] = given["id"] + 1

    with (
        make(url, transform_spec=TransformSpec(in_place)) as reader,
        pytest.raises(DataError, match="NoneType.*place"),
    ):
        next(reader)


@pytest.mark.parametrize(
    ("declared", "returned", "found"),
    [
        ((2, 3), (2, 3), (2, 3)),
        ((2, 3), (6,), (2, 3)),
        ((None, 3), (2, 3), (2, 3)),
        ((-1, 3), (2, 3), (2, 3)),
        ((-1, 3), (6,), (2, 3)),
        ((2, 3), (3, 3), None),
        ((None, 3), (2, 2), None),
        ((3,), (2,), (2,)),  # petastorm does not check lists either
    ],
)
def test_rows_have_the_shape_that_edit_fields_declare(
    url: str, declared: tuple[Any, ...], returned: tuple[int, ...], found: tuple[int, ...] | None
) -> None:
    spec = TransformSpec(
        lambda frame: frame.assign(x=[np.zeros(returned) for _ in range(len(frame))]),
        edit_fields=[edit_field("x", np.float32, declared, False)],
    )
    with make_batch_reader(url, transform_spec=spec) as reader:
        if found is None:
            with pytest.raises(DataError, match=r"'x' has rows of shape .* declares"):
                next(reader)
        else:
            assert next(reader).x.shape == (4, *found)
