"""The columns that ``transform`` adds: types, and parts of a model's outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hvd_cluster.data.schema import Column, ColumnKind
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.row_transform import RowTransform

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec

#: Types of output columns with several numbers per row: a Spark ML vector (on Spark), and a list of float32.
VECTOR = "vector"
ARRAY = "array"

#: The values of ``output_kinds``.
KINDS = ("plain", "vector", "array", "probability", "argmax", "columns")

#: What the numbers of a classifier's output are: probabilities, logits of which one class is true ("logit") or any
#: number of them ("binary_logit"). The last if neither its loss nor its last layer says so: then they are taken for
#: "logit". Models that were saved by older versions have no "binary_logit".
SCALES = ("probability", "logit", "binary_logit", "")

#: Types of labels that Spark does not have -> types that hold the same numbers there.
_ON_SPARK = {"uint8": "int16"}


@dataclass(frozen=True)
class OutputColumn:
    """One column that ``transform`` adds."""

    name: str
    #: Index of the model's output that it comes from.
    output: int
    #: One of KINDS; a "columns" column holds one element.
    kind: str
    #: The numpy name of a scalar type, VECTOR or ARRAY.
    type: str
    #: Index in the output's row, for "columns".
    element: int = 0
    #: One of SCALES.
    scale: str = ""

    def values(self, output: Tensor) -> Tensor:
        """The column's values, shape (rows, ...), from an output of shape (rows, ...).

        Raises:
            DataError: the rows are of several dimensions, and the kind takes one.
        """
        if self.kind in ("plain", "vector", "array"):
            return output > 0 if self.type == "bool" and self.scale in ("logit", "binary_logit") else output
        if text := _dimensions_text(self.name, self.kind, output.shape[1:]):
            raise DataError(text)
        flat = output.reshape(len(output), -1)
        if self.kind == "columns":
            return flat[:, self.element]
        scale = self.scale
        if flat.shape[1] == 1:  # of the second of two classes
            scale = "logit" if scale == "binary_logit" else scale
            flat = torch.cat([1 - flat if self.scale == "probability" else torch.zeros_like(flat), flat], dim=1)
        if self.kind == "argmax":
            return flat.argmax(dim=1)
        if scale == "binary_logit":
            return torch.sigmoid(flat)
        return flat if scale == "probability" else torch.softmax(flat, dim=1)


def plan(
    names: Sequence[str],
    num_outputs: int,
    types: Sequence[str],
    shapes: Sequence[Sequence[int]] | None,
    kinds: Sequence[str] | None,
    on_spark: bool,
    scales: Sequence[str] = (),
) -> tuple[OutputColumn, ...]:
    """The columns, in order.

    Args:
        names: one for each of ``kinds``.
        num_outputs: outputs of the model; if there is one, all kinds are made from it.
        types: the type of each output's plain column.
        shapes: of one row of each output, if known.
        kinds: one of KINDS for each name; None for plain ones.
        on_spark: classes are float64, as Spark ML's evaluators expect, instead of int64.
        scales: one of SCALES for each output; () if they are not known.

    Raises:
        ValueError: the counts differ, the shape that "columns" needs is unknown, or "probability" or "argmax" is made
            of an output of several dimensions; all problems at once.
    """
    kinds = ["plain"] * num_outputs if kinds is None else kinds
    outputs = [0] * len(kinds) if num_outputs == 1 else list(range(num_outputs))
    wrong = []
    if len(kinds) != len(outputs):
        wrong.append(f"output_kinds has {len(kinds)} entries for {num_outputs} outputs: give one for each")
    if len(names) != len(kinds):
        wrong.append(f"output_cols has {len(names)} names for {len(kinds)} outputs")
    if any(
        kind == "columns" and (shapes is None or not _is_known(shapes[output]))
        for kind, output in zip(kinds, outputs, strict=False)
    ):
        wrong.append(
            "output_kinds: 'columns' needs the shapes of the outputs, which are known of a model that was fitted and "
            "that takes the feature columns"
        )
    if shapes is not None:
        chosen = [one for one in zip(names, kinds, outputs, strict=False) if _is_known(shapes[one[2]])]
        wrong += filter(None, (_dimensions_text(name, kind, shapes[output]) for name, kind, output in chosen))
    if wrong:
        raise ValueError("\n".join(wrong))
    found: list[OutputColumn] = []
    for name, kind, output in zip(names, kinds, outputs, strict=True):
        if kind == "columns":
            width = math.prod(shapes[output] if shapes is not None else ())
            found += [OutputColumn(f"{name}_{i}", output, kind, "float32", i) for i in range(width)]
            continue
        type_of_kind = {
            "plain": _ON_SPARK.get(types[output], types[output]) if on_spark else types[output],
            "vector": VECTOR,
            "array": ARRAY,
            "probability": VECTOR,
            "argmax": "float64" if on_spark else "int64",
        }
        scale = scales[output] if scales else ""
        found.append(OutputColumn(name, output, kind, type_of_kind[kind], scale=scale))
    return tuple(found)


def metadata_of(spec: FitSpec) -> dict[str, Any]:
    """What a model keeps of training as plain data: its columns, dtypes and shapes.

    ``feature_units`` are the units of features that hold times ("D", "s", "ms", "us" or "ns"), and "" for others. Older
    saved models do not have them. ``edit_fields`` and ``removed_fields`` are those of ``transformation_fn``.
    ``made`` and ``by_keyword`` say in which way the model gets what ``preprocess`` returns; ``feature_dtypes`` are of
    that, if there is one.
    """
    schema, inputs = spec.dataset.schema, spec.inputs
    shapes, transform = spec.output_shapes, spec.transformation_fn
    edits = transform if isinstance(transform, RowTransform) else RowTransform(transform, {}, frozenset())
    labels: list[Column] = [schema[name] for name in inputs.label_cols]
    if len(shapes) != len(labels):  # there are outputs without a label
        labels = [
            schema[name] if name in inputs.label_cols else Column(name, ColumnKind.NUMERIC, "float64")
            for name in spec.output_names
        ]
    return {
        "feature_cols": inputs.feature_cols,
        "label_cols": inputs.label_cols,
        "feature_dtypes": inputs.feature_dtypes,
        "made": inputs.made,
        "by_keyword": inputs.by_keyword,
        "feature_units": tuple(schema[name].unit for name in inputs.feature_cols),
        "output_types": tuple(
            output_type(label.kind, label.dtype, shape) for label, shape in zip(labels, shapes, strict=False)
        ),
        "output_shapes": shapes,
        "output_names": spec.output_names,
        "is_transformed": edits.fn is not None,
        "edit_fields": tuple((name, np.dtype(dtype).str, shape) for name, (dtype, shape) in edits.fields.items()),
        "removed_fields": tuple(sorted(edits.removed)),
    }


def _dimensions_text(name: str, kind: str, shape: Sequence[int]) -> str:
    """The mistake of a class column whose rows have several dimensions; or empty."""
    if kind not in ("probability", "argmax") or sum(size != 1 for size in shape) < 2:
        return ""
    return (
        f"output column {name!r}: {kind!r} takes one number for each class, and the model returns the shape "
        f"{tuple(shape)} for a row: output_kinds='array' keeps the numbers, to which you can apply softmax or argmax "
        "over the dimension of the classes; or let the model return one row of classes"
    )


def _is_known(shape: Sequence[int]) -> bool:
    """Whether known: not if a LightningModule did not take features before the fit."""
    return all(length >= 0 for length in shape)


def output_type(kind: ColumnKind, dtype: str, shape: Sequence[int]) -> str:
    """The type: the label's for one number per row (integers rounded), else a vector.

    It is the label's too if the shape is not known.
    """
    if (_is_known(shape) and math.prod(shape) != 1) or kind in {ColumnKind.LIST, ColumnKind.VECTOR}:
        return VECTOR
    return dtype if kind in {ColumnKind.NUMERIC, ColumnKind.BOOL} and dtype != "float16" else "float64"
