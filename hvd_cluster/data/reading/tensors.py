"""Arrow record batches <-> dictionaries of tensors, without a Python loop.

The reader and the models' ``transform`` both go through here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvd_cluster.data.columns import vectors
from hvd_cluster.data.columns.arrays import to_numpy
from hvd_cluster.data.columns.arrow_values import is_list, nulls_text
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import Column, Schema, infer, is_vector
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def to_tensors(
    batch: pa.RecordBatch | pa.Table, schema: Schema | None = None, *, share_memory: bool = False
) -> dict[str, torch.Tensor]:
    """The columns of an Arrow batch or table as tensors.

    Args:
        batch: n rows.
        schema: the columns to convert; None for all columns of the batch.
        share_memory: let tensors be views of the batch's memory where the type allows it; then writing to a
            tensor writes to the batch.

    Returns:
        Name -> tensor of shape ``(n, *column.shape)`` and dtype ``column.dtype``, on the CPU.

    Raises:
        DataError: a column is missing, holds nulls, or holds what no tensor can; all such columns are named.
    """
    schema = infer(batch.schema) if schema is None else schema
    infer(batch.schema, schema.names)  # names what is missing or of an impossible type, all at once
    schema.require_tensors()
    tensors: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for column in schema:
        try:
            tensors[column.name] = to_tensor(batch.column(column.name), column, share_memory=share_memory)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return tensors


def to_tensor(array: pa.Array | pa.ChunkedArray, column: Column, *, share_memory: bool = False) -> torch.Tensor:
    """One column as a tensor of shape ``(n, *column.shape)``; see :func:`to_tensors`."""
    pyarrow = load_pyarrow()
    chunks = array.chunks if isinstance(array, pyarrow.ChunkedArray) else [array]
    if not chunks:
        chunks = [pyarrow.array([], type=array.type)]
    if array.null_count:
        raise DataError(nulls_text(column.name, array.null_count))
    tensors = [torch.from_numpy(to_numpy(chunk, column)) for chunk in chunks]
    if len(tensors) == 1:
        return tensors[0] if share_memory else tensors[0].clone()
    # A chunk without rows cannot know the length of its lists.
    tensors = [tensor for tensor in tensors if len(tensor)] or tensors[:1]
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        raise DataError(f"column {column.name!r} changes its shape from row to row: {sorted(shapes)}")
    return torch.cat(tensors)


def to_arrow(tensor: torch.Tensor, arrow_type: Any) -> pa.Array:
    """A tensor as an Arrow array of a given type.

    Args:
        tensor: shape (n,), (n, 1) for a scalar type; (n, ...) for lists and vectors, where each row is flattened.
        arrow_type: integer (values are rounded), floating, bool (rounded, then ``> 0``) or decimal; NaN becomes null
            but in floats;
            ``list``, ``large_list`` or ``fixed_size_list`` of such; or the struct of Spark's vectors.

    Raises:
        DataError: the rows have more than one element where the type is a scalar, or values do not fit the type.
    """
    pyarrow = load_pyarrow()
    types = load_pyarrow("pyarrow.types")
    # NumPy has no bfloat16.
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    values = tensor.detach().cpu().contiguous().numpy()
    n = len(values)
    matrix = values.reshape(n, -1) if values.size else values.reshape(n, int(np.prod(values.shape[1:])))
    if is_vector(arrow_type):
        return vectors.from_matrix(matrix)
    if is_list(types, arrow_type):
        elements = _scalars(matrix.reshape(-1), arrow_type.value_type)
        size = matrix.shape[1]
        if types.is_fixed_size_list(arrow_type):
            if size != arrow_type.list_size:
                raise DataError(f"the rows have {size} elements each, which do not fit {arrow_type}")
            return pyarrow.FixedSizeListArray.from_arrays(elements, type=arrow_type)
        large = types.is_large_list(arrow_type)
        offsets = pyarrow.array(np.arange(n + 1) * size, type=pyarrow.int64() if large else pyarrow.int32())
        layout = pyarrow.LargeListArray if large else pyarrow.ListArray
        return layout.from_arrays(offsets, elements, type=arrow_type)
    if n and matrix.shape[1] != 1:
        raise DataError(f"the rows have {matrix.shape[1]} elements each, which do not fit the scalar type {arrow_type}")
    return _scalars(matrix.reshape(-1), arrow_type)


def _scalars(values: Any, arrow_type: Any) -> pa.Array:
    """Numbers of shape (n,) as an Arrow array of a scalar type."""
    pyarrow = load_pyarrow()
    types = load_pyarrow("pyarrow.types")
    try:
        if types.is_boolean(arrow_type):
            # Not `!= 0`: the logit of a sure False is far below 0.
            floats = values.astype(np.float64)
            return pyarrow.array(np.rint(floats) > 0, mask=np.isnan(floats))
        if types.is_integer(arrow_type) and values.dtype.kind == "f":
            # Also beyond 2**53 and out of range: Arrow checks, NumPy would wrap.
            missing = np.isnan(values)
            rounded = np.rint(np.where(missing, 0, values).astype(np.float64))
            return pyarrow.array(rounded, mask=missing).cast(arrow_type)
        if types.is_integer(arrow_type) or types.is_floating(arrow_type):
            array = pyarrow.array(values.astype(np.uint8) if values.dtype == np.bool_ else values)
            return array.cast(arrow_type, safe=not types.is_floating(arrow_type))
        if types.is_decimal(arrow_type):
            floats = values.astype(np.float64)
            return pyarrow.array(floats, mask=np.isnan(floats)).cast(arrow_type, safe=False)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"values do not fit the type {arrow_type}: {error}") from error
    raise DataError(f"numbers cannot be stored as {arrow_type}: choose a numeric type, a list of one, or a vector")
