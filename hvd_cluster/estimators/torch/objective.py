"""What a training step minimises: outputs against labels, weighted by label and by row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def as_outputs(outputs: Any) -> list[Tensor]:
    """A model's outputs as a list, whether it returned one tensor, or a tuple, list or dict of them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return list(outputs.values()) if isinstance(outputs, dict) else list(outputs)


@dataclass(frozen=True)
class Objective:
    """The loss over all label columns."""

    #: fn(output, label) -> scalar for each label column. With row weights it is called with ``reduction="none"`` and
    #: returns one number for each row.
    losses: tuple[Any, ...]
    #: One weight for each label column.
    loss_weights: tuple[float, ...]
    #: Shape of each label's batch, or None for the output's.
    label_shapes: tuple[tuple[int, ...], ...] | None = None

    def transform_outputs(self, outputs: Any, labels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs as a list, and labels in the shape that the loss needs.

        A label with as many elements as its output gets the output's shape: (rows,) and (rows, 1) would otherwise be
        broadcast to (rows, rows).
        """
        listed = as_outputs(outputs)
        if self.label_shapes is not None:
            shaped = [label.reshape(shape) for label, shape in zip(labels, self.label_shapes, strict=True)]
        else:
            shaped = [
                label.reshape(output.shape) if label.numel() == output.numel() else label
                for output, label in zip(listed, labels, strict=False)
            ]
        return listed, shaped

    def __call__(
        self, outputs: Sequence[Tensor], labels: Sequence[Tensor], sample_weights: Tensor | None = None
    ) -> Tensor:
        """The weighted sum of the losses, a scalar; each is the mean over the rows of the batch.

        Args:
            sample_weights: (rows,) factor of each row's loss. The mean divides by the number of rows, not by their sum.
        """
        total: Any = 0.0
        for fn, weight, output, label in zip(self.losses, self.loss_weights, outputs, labels, strict=True):
            total = total + weight * self._one(fn, output, label, sample_weights)
        return total  # type: ignore[no-any-return]

    @staticmethod
    def _one(fn: Any, output: Tensor, label: Tensor, sample_weights: Tensor | None) -> Tensor:
        if sample_weights is None:
            return fn(output, label)  # type: ignore[no-any-return]
        rows = sample_weights.shape[0]
        each = per_row(fn, output, label).reshape(rows, -1).mean(dim=1)
        return (each * sample_weights).mean()


def per_row(fn: Any, output: Tensor, label: Tensor) -> Tensor:
    """``fn`` without its reduction: an attribute of torch's loss modules, an argument of functions."""
    if isinstance(fn, torch.nn.Module) and hasattr(fn, "reduction"):
        unreduced: Any = copy.copy(fn)
        unreduced.reduction = "none"
        return unreduced(output, label)  # type: ignore[no-any-return]
    return fn(output, label, reduction="none")  # type: ignore[no-any-return]
