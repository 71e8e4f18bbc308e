"""Which columns ``transform`` adds, of which type, and what of a model's outputs goes into each: a pure plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Types of output columns that hold several numbers a row: Spark ML's vector where Spark is, and a list of float32.
VECTOR = "vector"
ARRAY = "array"

#: What ``output_kinds`` may say of a column.
KINDS = ("plain", "vector", "array", "probability", "argmax", "columns")


#: Types of labels that Spark has not -> those that hold the same numbers there.
_ON_SPARK = {"uint8": "int16"}


@dataclass(frozen=True)
class OutputColumn:
    """One column that ``transform`` adds."""

    name: str
    #: Which of the model's outputs it comes from.
    output: int
    #: One of KINDS; a column of "columns" holds one element.
    kind: str
    #: The numpy name of a scalar type, VECTOR or ARRAY.
    type: str
    #: Which element of the output's row, for "columns".
    element: int = 0

    def values(self, output: Tensor) -> Tensor:
        """What the column holds, shape (rows, ...), of an output of shape (rows, ...)."""
        if self.kind in ("plain", "vector", "array"):
            return output
        flat = output.reshape(len(output), -1)
        if self.kind == "columns":
            return flat[:, self.element]
        if flat.shape[1] == 1:  # one logit: that of the second of two classes
            flat = torch.cat([torch.zeros_like(flat), flat], dim=1)
        return flat.argmax(dim=1) if self.kind == "argmax" else torch.softmax(flat, dim=1)


def plan(
    names: Sequence[str],
    num_outputs: int,
    types: Sequence[str],
    shapes: Sequence[Sequence[int]] | None,
    kinds: Sequence[str] | None,
    on_spark: bool,
) -> tuple[OutputColumn, ...]:
    """The columns, in order.

    Args:
        names: one for each of ``kinds``.
        num_outputs: outputs of the model; where there is one, several kinds are all made of it.
        types: the type of each output's plain column.
        shapes: of one row of each output, if known.
        kinds: one of KINDS for each name; None for plain ones.
        on_spark: classes are then float64, as Spark ML's evaluators want them, and not int64.

    Raises:
        ValueError: numbers do not agree, or the shape that "columns" needs is not known; all at once.
    """
    kinds = ["plain"] * num_outputs if kinds is None else kinds
    outputs = [0] * len(kinds) if num_outputs == 1 else list(range(num_outputs))
    wrong = []
    if len(kinds) != len(outputs):
        wrong.append(f"output_kinds has {len(kinds)} entries for {num_outputs} outputs: give one for each")
    if len(names) != len(kinds):
        wrong.append(f"output_cols has {len(names)} names for {len(kinds)} outputs")
    if "columns" in kinds and shapes is None:
        wrong.append("output_kinds: 'columns' needs a model that was fitted, which knows the shapes of its outputs")
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
        found.append(OutputColumn(name, output, kind, type_of_kind[kind]))
    return tuple(found)
