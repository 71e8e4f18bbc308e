"""Batches of columns as what Keras models take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from hvd_cluster.estimators.run.epoch_timer import EpochTimer
from hvd_cluster.estimators.run.readers import Readers, rows_of
from hvd_cluster.estimators.spec import Inputs

_CPU = torch.device("cpu")
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class KerasColumns:
    """How columns become the ``x``, ``y`` and ``sample_weight`` of a Keras model."""

    inputs: Inputs
    #: Shape of each label's batch, -1 for the rows; None: as stored.
    label_shapes: tuple[tuple[int, ...] | None, ...]
    #: Names of the model's inputs and outputs, where it takes or returns dicts.
    input_keys: tuple[str, ...] | None = None
    output_keys: tuple[str, ...] | None = None

    def item(self, batch: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """``(x, y)``, or ``(x, y, sample_weight)`` where rows are weighted."""
        self.inputs.warn_of_inexact(batch)
        x = [feature.numpy() for feature in self.inputs.features(batch, _CPU)]
        y = [
            (label if shape is None else label.reshape(shape)).numpy()
            for label, shape in zip(self.inputs.labels(batch, _CPU), self.label_shapes, strict=True)
        ]
        weights = self.inputs.sample_weights(batch, _CPU)
        item = (structured(x, self.input_keys), structured(y, self.output_keys))
        if weights is None:
            return item
        return (*item, structured([weights.numpy()] * len(y), self.output_keys))


def structured(arrays: Sequence[Any], keys: Sequence[str] | None) -> Any:
    """One array alone, several as a tuple (in lists TensorFlow would stack them), or all as a dict."""
    if keys is not None:
        return dict(zip(keys, arrays, strict=True))
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def flat(outputs: Any, keys: Sequence[str] | None = None) -> list[Any]:
    """A model's outputs as a list, whether it returned one, or a list or tuple of them, or a dict with ``keys``."""
    if isinstance(outputs, Mapping):
        return [outputs[key] for key in keys or outputs]
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def inputs_of(model: Any) -> Any:
    """What a functional model, or a Sequential that knows its input, says of its inputs; None for other models."""
    return getattr(getattr(model, "_functional", model), "_inputs_struct", None)


def keys_of(structure: Any) -> tuple[str, ...] | None:
    """The names in a model's structure of inputs or outputs; None where it is no dict."""
    return tuple(structure) if isinstance(structure, Mapping) else None


@dataclass
class KerasBatches:
    """The training batches of a fit, epoch after epoch, and the validation batches of one epoch."""

    columns: KerasColumns
    readers: Readers
    #: Of the epoch that is being read; tf.data may be a little ahead of the model.
    timer: EpochTimer = dataclasses.field(default_factory=EpochTimer)

    def training(self, first_epoch: int, epochs: int, done: int = 0) -> Iterator[tuple[Any, ...]]:
        """Items of the epochs from ``first_epoch`` on, but for the first ``done`` of that one."""
        for epoch in range(first_epoch, epochs):
            batches = self.readers.train_batches(epoch, done if epoch == first_epoch else 0)
            while True:
                with self.timer.waiting():  # by the clock of now: Keras takes the first batches before an epoch begins
                    batch = next(batches, None)
                if batch is None:
                    break
                yield self.columns.item(batch)

    def validation(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Rows and item of each validation batch of this rank; 0 from where it repeats a row, in step with others."""
        for batch in self.readers.validation_batches():
            yield rows_of(batch), self.columns.item(batch)


def as_taken(backend: str, first: Any, rest: Iterator[Any], prefetch: int = 0) -> Any:
    """Items as ``fit`` and ``evaluate`` take them on a backend of Keras; to be iterated once.

    On TensorFlow, Keras would make a pipeline of them itself, whose end may take a minute: see ``of_batches``.

    Args:
        backend: its name.
        first: the first item, of whose structure, dtypes and shapes the others are, but for the number of rows.
        rest: the others.
        prefetch: items that TensorFlow takes in advance; 0 lets it choose.
    """
    items = _chained(first, rest)
    if backend != "tensorflow":
        return items
    from hvd_cluster.data.tf_dataset import of_batches

    return of_batches(lambda: items, first, prefetch)


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """A generator: of other iterators Keras takes no batches."""
    yield first
    yield from rest
