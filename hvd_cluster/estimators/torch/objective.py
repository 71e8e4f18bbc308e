"""What a step minimises: outputs against labels, weighted by label and by row."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def named_outputs(outputs: Any, order: Sequence[str] = ()) -> dict[str, Any]:
    """A model's outputs by name, from a tensor, or a tuple, list, dict or dataclass.

    Without names they are numbered. Of a dict or dataclass, entries that are None, and the loss, are left out, and so
    is what cannot be an output: the caches of transformers' ``ModelOutput``.

    Args:
        outputs: what the model returned.
        order: these come first, if they are names of outputs; the others are in the model's order.
    """
    named = _named(outputs)
    if named is None:
        return {str(index): value for index, value in enumerate([outputs] if isinstance(outputs, Tensor) else outputs)}
    return {name: named[name] for name in (*order, *named)} if set(order) <= set(named) else named


def of_labels(named: Mapping[str, Any], label_cols: Sequence[str]) -> list[Any]:
    """The outputs with the label columns' names, if each column has one; else all.

    Args:
        named: what :func:`named_outputs` returned.
    """
    return [named[name] for name in (label_cols if set(label_cols) <= set(named) and label_cols else named)]


def _named(outputs: Any) -> dict[str, Any] | None:
    """The outputs that have names; None if they have none."""
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if isinstance(outputs, Mapping):
        kept = {name: value for name, value in outputs.items() if isinstance(value, Tensor) and value.dim()}
        return kept or dict(outputs)
    return dict(outputs._asdict()) if hasattr(outputs, "_asdict") else None


def as_outputs(outputs: Any, output_fn: Callable[[Any], Any] | None = None, order: Sequence[str] = ()) -> list[Tensor]:
    """A model's outputs, or ``output_fn``'s, as a list; see :func:`named_outputs`."""
    return list(named_outputs(outputs if output_fn is None else output_fn(outputs), order).values())


def reshaped(batch: Tensor, shape: Sequence[int]) -> Tensor:
    """A batch in a shape whose first size stands for any number of rows.

    The first size may be -1, or a number of rows.
    """
    if math.prod(shape[1:]) == math.prod(batch.shape[1:]):
        shape = (-1, *shape[1:])
    return batch.reshape(tuple(shape))


def own_loss(outputs: Any) -> Tensor:
    """The loss that a model has computed itself, from labels among its arguments.

    Raises:
        ValueError: it returned none.
    """
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the model returned no loss ({type(outputs).__name__}): give loss=, or let forward() return an output "
            "with an attribute or key 'loss' when it gets the labels"
        )
    return found


@dataclass(frozen=True)
class Objective:
    """The loss over all label columns."""

    #: fn(output, label) -> scalar for each label column. With row weights it is called with ``reduction="none"`` and
    #: returns one number for each row. Without any the model computes its own loss.
    losses: tuple[Any, ...]
    #: One weight for each label column.
    loss_weights: tuple[float, ...]
    #: Shape of each label's batch, or None for the output's.
    label_shapes: tuple[tuple[int, ...], ...] | None = None
    #: Takes what counts of the model's outputs.
    output_fn: Callable[[Any], Any] | None = None
    #: The label columns, which decide the order of outputs that have their names.
    label_cols: tuple[str, ...] = ()

    def evaluated(
        self, raw: Any, labels: Sequence[Tensor], sample_weights: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The outputs, the labels in the loss's shape, and the loss, of a model's result.

        Raises:
            ValueError: the model was to compute the loss, and has returned none.
        """
        outputs, shaped = self.transform_outputs(raw, labels)
        loss = self(outputs, shaped, sample_weights) if self.losses else own_loss(raw)
        return outputs, shaped, loss

    def transform_outputs(self, outputs: Any, labels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs as a list, and labels in the shape that the loss needs.

        A label with as many elements as its output gets the output's shape: (rows,) and (rows, 1) would otherwise be
        broadcast to (rows, rows).
        """
        listed = self.listed(outputs)
        return listed, self.shaped_labels(listed, labels)

    def listed(self, outputs: Any) -> list[Tensor]:
        """What the model returned, as a list with an output for each label column."""
        counted = outputs if self.output_fn is None else self.output_fn(outputs)
        return of_labels(named_outputs(counted, self.label_cols), self.label_cols)

    def shaped_labels(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """The labels in the shape that the loss needs; see :meth:`transform_outputs`."""
        if self.label_shapes is not None:
            return [reshaped(label, shape) for label, shape in zip(labels, self.label_shapes, strict=True)]
        return [
            label.reshape(output.shape) if label.numel() == output.numel() else label
            for output, label in zip(outputs, labels, strict=False)
        ]

    def __call__(
        self, outputs: Sequence[Tensor], labels: Sequence[Tensor], sample_weights: Tensor | None = None
    ) -> Tensor:
        """The weighted sum of the losses, a scalar.

        Each loss is the mean over the rows of the batch.

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
    """``fn`` without reduction: an attribute of modules, an argument of functions."""
    if isinstance(fn, torch.nn.Module) and hasattr(fn, "reduction"):
        unreduced: Any = copy.copy(fn)
        unreduced.reduction = "none"
        return unreduced(output, label)  # type: ignore[no-any-return]
    return fn(output, label, reduction="none")  # type: ignore[no-any-return]
