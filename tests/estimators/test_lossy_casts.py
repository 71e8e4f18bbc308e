"""Values of a column that another dtype cannot hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hvd_cluster.estimators.lossy_casts import inexact_text, inexact_value

I64, F64, F32 = torch.int64, torch.float64, torch.float32


@pytest.mark.parametrize(
    ("values", "stored", "dtype", "first"),
    [
        ([0, 2**24, -(2**24)], I64, "float32", None),
        ([0, 2**24 + 1], I64, "float32", 2**24 + 1),
        ([2**40], I64, "float32", None),  # a power of two is exact
        ([-(2**24) - 1], torch.int32, "float32", -(2**24) - 1),
        ([2**53], I64, "float64", None),
        ([2**53 + 1], I64, "float64", 2**53 + 1),
        ([2**63 - 1], I64, "float64", 2**63 - 1),
        ([2**63 - 1], I64, "float32", 2**63 - 1),
        ([2049], torch.int16, "float16", 2049),
        ([257], torch.int16, "bfloat16", 257),
        ([70000], I64, "float16", 70000),
        ([2**31], I64, "int32", 2**31),
        ([2**31 - 1], I64, "int32", None),
        ([0, -1], torch.int32, "int64", None),
        ([0.1, 1e-30, math.nan, math.inf], F64, "float32", None),
        ([2.0**24 + 1], F64, "float32", 2.0**24 + 1),
        ([1e39], F64, "float32", 1e39),
        ([16777216.5], F64, "float32", None),
        ([1.0, 2.0], F64, "int64", None),
        ([1.5], F32, "int64", 1.5),
        ([1e30], F32, "int64", 1e30),
        ([0.5], F32, "float64", None),
        ([], I64, "float32", None),
        ([True], torch.bool, "float32", None),
        ([5], torch.uint8, "float32", None),
        ([0, 1], I64, "bool", None),
        ([0, 2], I64, "bool", 2),
        ([1.0, 0.5], F32, "bool", 0.5),
        ([44, 300], I64, "uint8", 300),
    ],
)
def test_the_first_value_that_the_dtype_cannot_hold_is_found(
    values: list[Any], stored: torch.dtype, dtype: str, first: Any
) -> None:
    found = inexact_value(torch.tensor(values, dtype=stored), dtype)
    assert found == (None if first is None else torch.tensor(first, dtype=stored).item())


def test_the_warning_has_the_value_before_and_after() -> None:
    assert "column 'id' holds 16777217, which becomes 16777216.0 in the model's float32" in inexact_text(
        "id", 2**24 + 1, "float32"
    )
