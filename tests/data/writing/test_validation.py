"""The draw of validation rows: exact, repeatable, the same however the rows arrive."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cluster.data.writing.column_stats import TableStats
from hvd_cluster.data.writing.validation import check, column_mask, ratio_mask
from hvd_cluster.errors import DataError


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    ratio=st.floats(0.001, 0.999),
    seed=st.integers(-(2**40), 2**70),
    stream=st.integers(0, 5000),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=8),
)
def test_a_row_is_drawn_or_not_whatever_batch_it_is_in(ratio: float, seed: int, stream: int, cuts: list[int]) -> None:
    edges = np.cumsum([0, *cuts]).tolist()
    whole = ratio_mask(0, edges[-1], ratio, seed, stream)
    pieces = [ratio_mask(a, b, ratio, seed, stream) for a, b in itertools.pairwise(edges)]
    assert np.array_equal(whole, np.concatenate(pieces))
    assert abs(whole.sum() - ratio * edges[-1]) <= 2


def test_data_in_a_periodic_order_is_sampled_evenly() -> None:
    mask = ratio_mask(0, 10_000, 0.1, seed=0, stream=0)
    per_class = np.bincount(np.arange(10_000)[mask] % 10, minlength=10)
    assert per_class.min() > 60
    assert per_class.max() < 140


def test_seeds_and_streams_draw_differently() -> None:
    masks = {ratio_mask(0, 200, 0.2, seed, stream).tobytes() for seed in range(5) for stream in range(5)}
    assert len(masks) == 25


@pytest.mark.parametrize(("value", "kept"), [(None, None), (0, None), (0.0, None), (0.25, 0.25), ("held", "held")])
def test_the_parameter_has_one_form(value: Any, kept: Any) -> None:
    assert check(value) == kept


@pytest.mark.parametrize("value", [1, 1.0, -0.1, 2, float("nan"), True, "", [0.1]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match="validation is"):
        check(value)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([True, False, None, True]),
        pa.array([1, 0, None, 2], pa.int8()),
        pa.array([0.5, -1.0, None, 1e-9]),
        pa.array([3, 0, None, 1], pa.decimal128(3, 1)),
    ],
    ids=lambda array: str(array.type),
)
def test_a_column_marks_what_is_true_or_above_zero_and_its_nulls_are_counted(array: pa.Array) -> None:
    stats = TableStats()
    assert column_mask(array, "held", stats).tolist() == [True, False, False, True]
    assert "column 'held' holds 1 null" in stats.problems()[0]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([(1 << 60) + 1, 0]),
        pa.array([(1 << 64) - 1, 0], pa.uint64()),
        pa.array([Decimal((1 << 60) + 1), Decimal(0)], pa.decimal128(38, 0)),
        pa.array([Decimal("0.01"), Decimal("-0.01")]),
        pytest.param(pa.array(np.array([1, 0], np.float16)), marks=pytest.mark.needs("pyarrow>=16")),
    ],
    ids=lambda array: str(array.type),
)
def test_a_column_is_compared_in_its_own_type(array: pa.Array) -> None:
    assert column_mask(array, "held", TableStats()).tolist() == [True, False]


def test_a_column_of_text_marks_nothing() -> None:
    with pytest.raises(DataError, match="'held' holds string: it must be bool, or numeric"):
        column_mask(pa.array(["a"]), "held", TableStats())
