"""Arrow to tensors and back: the numbers, the shapes, the dtypes, and who owns the memory."""

from __future__ import annotations

import decimal
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from hvd_cluster.data.columns.vectors import from_matrix, vector_type
from hvd_cluster.data.reading.tensors import to_arrow, to_tensor, to_tensors
from hvd_cluster.data.schema import infer
from hvd_cluster.errors import DataError

DENSE = {"type": 1, "size": None, "indices": None}
SPARSE = {"type": 0, "size": 3}
VECTORS = [
    {**DENSE, "values": [1.0, 0.0, 2.0]},
    {**SPARSE, "indices": [1], "values": [5.0]},
    {**SPARSE, "indices": [], "values": []},
    {**DENSE, "values": [7.0, 8.0, 9.0]},
    {**SPARSE, "indices": [0, 2], "values": [3.0, 4.0]},
]
MATRIX = [[1.0, 0, 2], [0, 5, 0], [0, 0, 0], [7, 8, 9], [3, 0, 4]]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([-1, 2, 3], pa.int8()), torch.tensor([-1, 2, 3], dtype=torch.int8)),
        (pa.array([1, 2, 300], pa.int16()), torch.tensor([1, 2, 300], dtype=torch.int16)),
        (pa.array([1, 2, 200], pa.uint8()), torch.tensor([1, 2, 200], dtype=torch.uint8)),
        (pa.array([1, 2, 65535], pa.uint16()), torch.tensor([1, 2, 65535], dtype=torch.int32)),
        (pa.array([1, 2, 2**32 - 1], pa.uint32()), torch.tensor([1, 2, 2**32 - 1])),
        (pa.array([1, 2, 2**63 - 1], pa.uint64()), torch.tensor([1, 2, 2**63 - 1])),
        (pa.array(np.array([1, 2.5, -3], np.float16)), torch.tensor([1, 2.5, -3], dtype=torch.float16)),
        (pa.array([1, 2.5, float("nan")], pa.float32()), torch.tensor([1, 2.5, float("nan")])),
        (pa.array([True, False, True]), torch.tensor([True, False, True])),
        (pa.array([decimal.Decimal("1.25")] * 3), torch.tensor([1.25] * 3, dtype=torch.float64)),
        (pa.array([1, 2, 1]).dictionary_encode(), torch.tensor([1, 2, 1])),
        (pa.array([[1, 2], [3, 4], [5, 6]]), torch.tensor([[1, 2], [3, 4], [5, 6]])),
        (pa.array([[True], [False], [True]]), torch.tensor([[True], [False], [True]])),
        (pa.array([[1, 2], [3, 4], [5, 6]], pa.large_list(pa.uint16())), torch.tensor([[1, 2], [3, 4], [5, 6]]).int()),
        (pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)), torch.tensor([[1.0, 2], [3, 4], [5, 6]])),
        (pa.array([[[1, 2], [3, 4]]] * 3), torch.tensor([[[1, 2], [3, 4]]] * 3)),
        (pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.int64(), 2))), torch.tensor([[[1, 2], [3, 4]]] * 3)),
        (pa.array(VECTORS[:3], vector_type()), torch.tensor(MATRIX[:3], dtype=torch.float64)),
        (pa.array([VECTORS[0]] * 3, vector_type()), torch.tensor([MATRIX[0]] * 3, dtype=torch.float64)),
        (pa.array([VECTORS[4]] * 3, vector_type()), torch.tensor([MATRIX[4]] * 3, dtype=torch.float64)),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_every_type_becomes_the_tensor_of_its_numbers(array: pa.Array, expected: torch.Tensor) -> None:
    column = infer(pa.schema([("c", array.type)]))["c"]
    # Also where it is a slice, or comes in pieces.
    longer = pa.concat_arrays([array, array])
    for data in (array, longer.slice(3), pa.chunked_array([array.slice(0, 1), array.slice(1, 0), array.slice(1)])):
        tensor = to_tensor(data, column)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.nan_to_num(7), expected.nan_to_num(7))
    assert to_tensor(array.slice(0, 0), column).shape[0] == 0


def test_dense_and_sparse_vectors_mix_in_one_column_wherever_it_is_cut() -> None:
    array = pa.array(VECTORS, vector_type())
    for start, stop in itertools.combinations(range(6), 2):
        tensors = to_tensors(pa.table({"v": array.slice(start, stop - start)}))
        assert tensors["v"].tolist() == MATRIX[start:stop]


def test_a_tensor_is_a_copy_unless_it_is_asked_to_share() -> None:
    batch = pa.RecordBatch.from_pydict({"x": pa.array([1.0, 2.0]), "l": pa.array([[1.0], [2.0]])})
    for tensor in to_tensors(batch).values():
        tensor.zero_()
    assert batch.column("x").to_pylist() == [1.0, 2.0]
    assert batch.column("l").to_pylist() == [[1.0], [2.0]]
    shared = to_tensors(batch, share_memory=True)
    shared["x"][0] = 5
    assert batch.column("x").to_pylist() == [5.0, 2.0]
    del batch
    assert shared["l"].tolist() == [[1.0], [2.0]]


def test_everything_that_is_wrong_with_a_batch_is_said_at_once() -> None:
    batch = pa.table(
        {
            "n": [1, None, None],
            "r": [[1], [1, 2], [1]],
            "i": [[1], [None], [2]],
            "u": pa.array([2**64 - 1] * 3, pa.uint64()),
        }
    )
    with pytest.raises(DataError) as caught:
        to_tensors(batch)
    text = str(caught.value)
    assert "column 'n' holds 2 nulls" in text
    assert "column 'r' holds lists of different lengths, 1 and 2 (row 1 of the batch)" in text
    assert "column 'i' holds 1 null inside its lists" in text
    assert "column 'u' holds unsigned integers that do not fit int64" in text


def test_nulls_among_the_distinct_values_of_a_dictionary_are_nulls() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([7.0, None]))
    with pytest.raises(DataError, match="column 'd' holds 1 null"):
        to_tensors(pa.table({"d": array}))


@pytest.mark.parametrize("indices", [[3], [-1]])
def test_a_broken_sparse_vector_is_refused(indices: list[int]) -> None:
    array = pa.array([{**SPARSE, "indices": indices, "values": [1.0]}], vector_type())
    with pytest.raises(DataError, match="broken sparse vector"):
        to_tensors(pa.table({"v": array}))


def test_vectors_of_different_sizes_are_refused() -> None:
    array = pa.array([VECTORS[0], {**DENSE, "values": [1.0]}], vector_type())
    with pytest.raises(DataError, match="'v' holds lists of different lengths, 3 and 1"):
        to_tensors(pa.table({"v": array}))


def test_strings_are_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"'s' \(string\).*transformation_fn"):
        to_tensors(pa.table({"s": ["a"]}))


# --- back -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrow_type", "expected"),
    [
        (pa.int32(), [1, 3, 0]),
        (pa.uint8(), [1, 3, 0]),
        (pa.bool_(), [True, True, False]),
        (pa.float64(), [1.25, 2.75, 0.25]),
        (pa.float32(), [1.25, 2.75, 0.25]),
        pytest.param(pa.float16(), [1.25, 2.75, 0.25], marks=pytest.mark.needs("pyarrow>=16")),
        (pa.decimal128(10, 2), [decimal.Decimal("1.25"), decimal.Decimal("2.75"), decimal.Decimal("0.25")]),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_scalars_come_back_in_the_wished_type(
    arrow_type: pa.DataType, expected: list[Any], shape: tuple[int, ...]
) -> None:
    array = to_arrow(torch.tensor([1.25, 2.75, 0.25]).reshape(shape), arrow_type)
    assert array.type == arrow_type
    assert array.to_pylist() == expected


@pytest.mark.parametrize(
    "arrow_type", [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 4)], ids=str
)
def test_rows_come_back_as_flat_lists(arrow_type: pa.DataType) -> None:
    tensor = torch.arange(12.0).reshape(3, 2, 2)
    array = to_arrow(tensor, arrow_type)
    array.validate(full=True)
    assert array.type == arrow_type
    assert array.to_pylist() == tensor.reshape(3, 4).tolist()


def test_rows_come_back_as_spark_vectors_and_return() -> None:
    tensor = torch.tensor(MATRIX, dtype=torch.float32)
    array = to_arrow(tensor, vector_type())
    array.validate(full=True)
    assert array.type == vector_type()
    assert array.to_pylist()[0] == VECTORS[0]
    assert torch.equal(to_tensors(pa.table({"v": array}))["v"].float(), tensor)
    assert from_matrix(np.zeros((0, 3))).to_pylist() == []


def test_tensors_on_the_graph_integers_and_bfloat16_come_back_too() -> None:
    assert to_arrow(torch.tensor([1.5], requires_grad=True), pa.float64()).to_pylist() == [1.5]
    assert to_arrow(torch.tensor([1.5], dtype=torch.bfloat16), pa.float32()).to_pylist() == [1.5]
    assert to_arrow(torch.tensor([2**60 + 1]), pa.int64()).to_pylist() == [2**60 + 1]
    assert to_arrow(torch.tensor([True]), pa.float32()).to_pylist() == [1.0]
    assert to_arrow(torch.zeros(0, 5), pa.list_(pa.float32())).to_pylist() == []
    assert to_arrow(torch.zeros(0, 1), pa.int8()).to_pylist() == []


def test_nan_is_null_where_the_type_is_an_integer() -> None:
    assert to_arrow(torch.tensor([float("nan"), 2.4]), pa.int64()).to_pylist() == [None, 2]


@pytest.mark.parametrize(
    ("tensor", "arrow_type", "message"),
    [
        (torch.zeros(2, 3), pa.float32(), "3 elements each, which do not fit the scalar type float"),
        (torch.tensor([300.0]), pa.int8(), "do not fit the type int8"),
        (torch.zeros(2, 3), pa.list_(pa.float32(), 4), "3 elements each"),
        (torch.zeros(2), pa.string(), "cannot be stored as string"),
    ],
)
def test_what_does_not_fit_is_refused(tensor: torch.Tensor, arrow_type: pa.DataType, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_arrow(tensor, arrow_type)


@pytest.mark.parametrize("arrow_type", [pa.bool_(), pa.int64(), pa.decimal128(4, 1), pa.list_(pa.bool_())])
def test_what_is_not_a_number_is_missing_among_bools_and_integers(arrow_type):
    found = to_arrow(torch.tensor([[float("nan")], [1.0]]), arrow_type).to_pylist()
    assert found == ([[None], [True]] if pa.types.is_list(arrow_type) else [None, 1])
