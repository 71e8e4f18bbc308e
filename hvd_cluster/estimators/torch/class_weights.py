"""Weights of rows by label, so that rare classes count as much as frequent ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.spec import TrainSpec

#: A label with more values than this is not a class.
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class ClassWeights:
    """label -> weight; other labels weigh 1."""

    weights: Mapping[float, float]
    _tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, spec: TrainSpec, hvd: Collectives) -> ClassWeights | None:
        """The weights that the spec asks for.

        For "balanced" all ranks count the labels together. A class with n of N rows, in k classes, weighs
        ``N / (k * n)``, as with scikit-learn's ``class_weight="balanced"``.

        Raises:
            DataError: the label has too many values to be a class.
        """
        if spec.class_weights is None:
            return None
        if spec.class_weights != "balanced":
            return cls(spec.class_weights)
        counts: Counter[float] = Counter()
        for labels in _labels(spec, hvd.rank(), hvd.size()):
            values, numbers = torch.unique(labels.to(torch.float64), return_counts=True)
            counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
            if len(counts) > MAX_CLASSES:
                raise DataError(f"class_weights: {spec.inputs.label_cols[0]!r} has over {MAX_CLASSES} different values")
        total: Counter[float] = Counter()
        for part in hvd.allgather_object(dict(counts), name="hvd_cluster.class_counts"):
            total.update(part)
        rows = sum(total.values())
        return cls({label: rows / (len(total) * number) for label, number in total.items()})

    @staticmethod
    def require_numbers(name: str, label: Tensor) -> None:
        """Check that a row of a label (rows, ...) is one number, which names a class.

        Raises:
            DataError: it is not.
        """
        if math.prod(label.shape[1:]) != 1:
            raise DataError(
                f"class_weights needs a label that names a class, and a row of {name!r} has the "
                f"shape {tuple(label.shape[1:])}: give a column with one number a row, or sample_weight_col"
            )

    def row_weights(self, labels: Tensor, weights: Tensor | None) -> Tensor:
        """(rows,) float32: the weight of each row's loss, multiplied by ``weights``."""
        known, factors = self._table(labels.dtype, labels.device)
        flat = labels.to(torch.float64).reshape(len(labels), -1)[:, 0]
        places = torch.searchsorted(known, flat).clamp(max=len(known) - 1)
        found = torch.where(known[places] == flat, factors[places], torch.ones_like(factors[places]))
        return found if weights is None else found * weights

    def _table(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The labels in ascending order, as float64, and their weights.

        The table is kept, as a copy waits for the device.
        """
        if (dtype, device) not in self._tables:
            known = torch.tensor(sorted(self.weights), dtype=torch.float64)
            if dtype.is_floating_point:  # the data have the model's dtype, in which 0.1 is another number
                known = known.to(dtype).to(torch.float64)
            factors = torch.tensor([self.weights[label] for label in sorted(self.weights)])
            self._tables[dtype, device] = known.to(device), factors.to(device)
        return self._tables[dtype, device]


def _labels(spec: TrainSpec, rank: int, size: int) -> Iterator[Tensor]:
    """The labels of this rank's share of the training rows."""
    data, name = spec.dataset, spec.inputs.label_cols[0]
    reader = ParquetReader(
        data.train,
        data.schema if spec.transformation_fn is not None else data.schema.select([name]),
        data.store,
        batch_size=4096,
        rank=rank,
        size=size,
        shuffle=False,
        remainder="partial",
        transformation_fn=spec.transformation_fn,
        num_threads=1,
    )
    for batch in reader.epoch(0):
        yield batch[name]
