"""The columns of a model as MLflow's signature, and rows of them as its example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_cluster.data.columns.arrow_values import is_bytes, is_list, is_text
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.estimators.scoring.output_columns import ARRAY, VECTOR, OutputColumn

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

#: numpy's names of scalars -> MLflow's, which has no shorter integers.
_SCALARS = {
    "bool": "boolean",
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), "integer"),
    **dict.fromkeys(("int64", "uint32", "uint64"), "long"),
    **dict.fromkeys(("float16", "float32"), "float"),
    "float64": "double",
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a model takes and returns."""

    #: ``pyarrow.Schema`` of the feature columns; a field is nullable if rows may hold nulls. None if unknown.
    inputs: pa.Schema | None
    outputs: tuple[OutputColumn, ...]
    #: Shape of one row of each of the model's outputs; () if unknown.
    output_shapes: tuple[Sequence[int], ...]

    def signature(self) -> Any:
        """The ``ModelSignature``; None if the inputs are unknown."""
        from mlflow.models import ModelSignature
        from mlflow.types import Schema

        if self.inputs is None:
            return None
        return ModelSignature(
            Schema([_input(field) for field in self.inputs]), Schema([_output(column) for column in self.outputs])
        )

    def metadata(self) -> dict[str, Any]:
        """Input types and row output shapes that signatures cannot hold; plain data."""
        arrays = [column for column in self.outputs if column.type in (VECTOR, ARRAY)]
        known = {column.name: self.output_shapes[column.output] for column in arrays if self.output_shapes}
        return {
            "input_types": {field.name: str(field.type) for field in self.inputs or ()},
            "output_shapes": {name: list(shape) for name, shape in known.items()},
        }


def example_frame(rows: pa.Table) -> pd.DataFrame | None:
    """Rows as MLflow writes them as JSON, with decimals as floats; None if it cannot."""
    pyarrow = load_pyarrow()
    try:
        cast = rows.cast(pyarrow.schema([field.with_type(_json_type(field.type)) for field in rows.schema]))
    except pyarrow.ArrowException:  # Arrow casts no such column
        return None
    frame: pd.DataFrame = cast.to_pandas()
    return frame


def _json_type(arrow_type: pa.DataType) -> pa.DataType:
    """The type whose values JSON holds.

    Raises:
        ArrowTypeError: there is none.
    """
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    if types.is_duration(arrow_type) or types.is_interval(arrow_type):
        raise pyarrow.ArrowTypeError(f"MLflow writes no {arrow_type} as JSON")
    if types.is_decimal(arrow_type):
        return pyarrow.float64()
    if types.is_struct(arrow_type):
        return pyarrow.struct([field.with_type(_json_type(field.type)) for field in arrow_type])
    if types.is_map(arrow_type):
        return pyarrow.map_(_json_type(arrow_type.key_type), _json_type(arrow_type.item_type))
    if types.is_list(arrow_type):
        return pyarrow.list_(arrow_type.value_field.with_type(_json_type(arrow_type.value_type)))
    if types.is_large_list(arrow_type):
        return pyarrow.large_list(arrow_type.value_field.with_type(_json_type(arrow_type.value_type)))
    if types.is_fixed_size_list(arrow_type):
        element = arrow_type.value_field.with_type(_json_type(arrow_type.value_type))
        return pyarrow.list_(element, arrow_type.list_size)
    return arrow_type


def _input(field: pa.Field) -> Any:
    """The ``ColSpec`` of a column.

    Columns of which MLflow would change values, or which it would refuse in some form that ``transform`` takes, are of
    any type: whole numbers and bools with nulls, which pandas holds as floats and objects; uint64; timestamps with a
    time zone; vectors, decimals, categories, structs and maps; all lists but those of floats, since a null in a list
    becomes "None" among strings and False among bools, bytes lose zeros at their end, and dates become numbers.
    """
    from mlflow.types import ColSpec, schema

    any_type: Any = schema.AnyType  # without annotations
    found = _type(field.type)
    types = load_pyarrow("pyarrow.types")
    has_nulls = field.nullable and (types.is_integer(field.type) or types.is_boolean(field.type))
    if found is None or has_nulls or types.is_uint64(field.type):
        return ColSpec(any_type(), field.name)
    # MLflow takes no null for a required array.
    return ColSpec(found, field.name, required=not (types.is_nested(field.type) and field.nullable))


def _type(arrow_type: pa.DataType) -> Any:
    """MLflow's type, or None."""
    from mlflow.types import DataType
    from mlflow.types.schema import Array

    types = load_pyarrow("pyarrow.types")
    if is_text(arrow_type):
        return DataType.string
    if is_bytes(arrow_type):
        return DataType.binary
    if types.is_date(arrow_type) or (types.is_timestamp(arrow_type) and arrow_type.tz is None):
        return DataType.datetime
    if is_list(types, arrow_type):
        # The numbers of lists, as JSON has them, are 64 bits wide, and MLflow would refuse them for a narrower type.
        inner = DataType.double if types.is_floating(arrow_type.value_type) else _type(arrow_type.value_type)
        return Array(inner) if inner == DataType.double or isinstance(inner, Array) else None
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return DataType[_SCALARS[np.dtype(arrow_type.to_pandas_dtype()).name]]
    return None


def _output(column: OutputColumn) -> Any:
    from mlflow.types import ColSpec, DataType
    from mlflow.types.schema import Array

    if column.type in (VECTOR, ARRAY):
        return ColSpec(Array(DataType.float), column.name)
    return ColSpec(DataType[_SCALARS[column.type]], column.name)
