"""Batches of columns as what Keras models take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.estimators.keras.structure import structured
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.torch.objective import reshaped

_CPU = torch.device("cpu")
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class KerasColumns:
    """How columns become the ``x``, ``y`` and ``sample_weight`` of a Keras model."""

    inputs: Inputs
    #: Shape of each label's batch, -1 for the rows; None: as stored.
    label_shapes: tuple[tuple[int, ...] | None, ...]
    #: Names of the model's inputs and outputs, where it takes or returns dicts; those with a label come first.
    input_keys: tuple[str, ...] | None = None
    output_keys: tuple[str, ...] | None = None

    def item(self, batch: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """``(x, y)``, or ``(x, y, sample_weight)`` where rows are weighted."""
        self.inputs.checked(batch)
        x = [feature.numpy() for feature in self.inputs.tensors(batch, _CPU)]
        y = [
            (label if shape is None else reshaped(label, shape)).numpy()
            for label, shape in zip(self.inputs.labels(batch, _CPU), self.label_shapes, strict=True)
        ]
        weights = self.inputs.sample_weights(batch, _CPU)
        # Keras's metrics look for a label of each output, and use those that they are given for.
        y += [np.zeros(len(y[0]), np.float32)] * (len(self.output_keys or y) - len(y))
        item = (structured(x, self.input_keys), structured(y, self.output_keys))
        return item if weights is None else (*item, structured([weights.numpy()] * len(y), self.output_keys))


def as_taken(backend: str, first: Any, rest: Iterator[Any], prefetch: int = 0) -> Any:
    """Items as ``fit`` and ``evaluate`` take them on a Keras backend; iterate once.

    On TensorFlow, Keras would make a pipeline of them itself, which may take a minute to end: see ``of_batches``.

    Args:
        backend: its name.
        first: the first item; the others have its structure, dtypes and shapes, except for the number of rows.
        rest: the others.
        prefetch: items that TensorFlow reads ahead; 0 lets TensorFlow choose.
    """
    items = (item for item in itertools.chain([first], rest))  # not another iterator: Keras takes those for samples
    if backend != "tensorflow":
        return items
    from hvd_cluster.data.tf_dataset import of_batches

    return of_batches(lambda: items, first, prefetch)
