"""What scoring needs to know about the training of a model: plain data, saved with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.schema import Kind
from hvd_cluster.estimators.scoring.output_columns import VECTOR

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


@dataclass(frozen=True)
class Metadata:
    """Columns, dtypes and shapes of what a model takes and returns."""

    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    #: dtype of each feature as the model takes it, by torch's name.
    feature_dtypes: tuple[str, ...]
    #: Unit of each feature that holds times: "D", "s", "ms", "us" or "ns"; "" for others. Older saved models have none.
    feature_units: tuple[str, ...]
    #: Type of each output column: a scalar's numpy name, or "vector".
    output_types: tuple[str, ...]
    #: Shape of one row of each output.
    output_shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, spec: FitSpec) -> Metadata:
        """The metadata of a model that was trained by ``spec``."""
        columns = [spec.dataset.schema[name] for name in spec.inputs.label_cols]
        return cls(
            feature_cols=spec.inputs.feature_cols,
            label_cols=spec.inputs.label_cols,
            feature_dtypes=spec.inputs.feature_dtypes,
            feature_units=tuple(spec.dataset.schema[name].unit for name in spec.inputs.feature_cols),
            output_types=tuple(
                output_type(column.kind, column.dtype, shape)
                for column, shape in zip(columns, spec.output_shapes, strict=False)
            ),
            output_shapes=spec.output_shapes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as models keep it."""
        return dataclasses.asdict(self)


def output_type(kind: Kind, dtype: str, shape: Sequence[int]) -> str:
    """The type of an output column: the label's for one number per row (integers are rounded), else a vector."""
    if math.prod(shape) != 1 or kind in {Kind.LIST, Kind.VECTOR}:
        return VECTOR
    return dtype if kind in {Kind.NUMERIC, Kind.BOOL} and dtype != "float16" else "float64"
