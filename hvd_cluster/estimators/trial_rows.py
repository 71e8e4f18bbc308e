"""The first training rows of a fit, to try a model on as its workers get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.schema import missing_columns_text
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.logged_model.first_rows import MAX_BYTES, MAX_ROWS, first_rows

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from hvd_cluster.estimators.spec import Inputs

#: Rows of the batch that the model and the loss are tried on.
_TRIED_ROWS = 8


class TrialRows:
    """The first training rows of a fit; with ``preprocess`` the data is read once.

    Args:
        dataset: the data.
        seed: of the fit.
        required: columns that a batch must have.
        transformation_fn, preprocess: applied to the rows.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        *,
        required: Sequence[str],
        transformation_fn: Callable[[dict[str, Any]], dict[str, Any]] | None,
        preprocess: Preprocess | None,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self._required = required
        self._transformation_fn = transformation_fn
        self._preprocess = None if preprocess is None else _Recorded.of(preprocess)
        #: By whether the rows are transformed.
        self._batches: dict[bool, dict[str, torch.Tensor]] = {}

    def batch(self, *, transformed: bool = True) -> dict[str, torch.Tensor]:
        """A few rows as in a training batch, or as stored, as ``transform`` reads them.

        Raises:
            DataError: ``preprocess`` or ``transformation_fn`` failed, or the latter removed columns that are needed.
        """
        transformed = transformed and self._transformation_fn is not None
        if transformed not in self._batches:
            self._batches[transformed] = self._read(transformed)
        return self._batches[transformed]

    def scored(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """What ``preprocess`` makes of these rows when it is called as for scoring.

        Args:
            inputs: those of the model.

        Raises:
            DataError: it fails, or returns other names than in training.
        """
        assert self._preprocess is not None
        self.batch()
        table, seeds, place = self._preprocess.calls[-1]
        as_scored = dataclasses.replace(self._preprocess.given, made=inputs.made)
        return as_scored(table, seeds, place)[0]

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Up to ``MAX_ROWS`` rows of features, each named once, before user functions."""
        if self._preprocess is None:
            return first_rows(self.dataset, columns)
        self.batch()
        return self._preprocess.tables[0].select(list(columns))

    def _read(self, transformed: bool) -> dict[str, torch.Tensor]:
        most = _TRIED_ROWS if self._preprocess is None else MAX_ROWS
        first = self.dataset.train.first(most, MAX_BYTES)
        reader = ParquetReader(
            first,
            self.dataset.schema,
            self.dataset.store,
            batch_size=min(most, first.rows),
            seed=self.seed,
            shuffle=False,
            remainder="pad",
            transformation_fn=self._transformation_fn if transformed else None,
            preprocess=self._preprocess,
            num_threads=1,
        )
        found = next(reader.epoch(0))
        lost = [name for name in self._required if name not in found]
        if lost:
            raise DataError(f"the rows of transformation_fn lack columns: {missing_columns_text(lost, list(found))}")
        return found


@dataclass(frozen=True, kw_only=True)
class _Recorded(Preprocess):
    """The tables that a function is called with.

    Of the first one, the function gets a few rows only.
    """

    given: Preprocess
    tables: list[pa.Table] = field(default_factory=list)
    #: The arguments of calls that made a batch.
    calls: list[tuple[pa.Table, Sequence[int], Callable[[int], str]]] = field(default_factory=list)

    @classmethod
    def of(cls, given: Preprocess) -> _Recorded:
        fields = {one.name: getattr(given, one.name) for one in dataclasses.fields(given)}
        return cls(**{**fields, "training": True}, given=given)

    def __call__(
        self, table: pa.Table, seeds: Sequence[int], place: Callable[[int], str]
    ) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.int64] | None]:
        rows = table if self.tables else table.slice(0, _TRIED_ROWS)
        self.tables.append(table)
        made, kept = super().__call__(rows, seeds, place)
        self.calls.append((rows, seeds, place))
        return made, np.arange(len(rows)) if kept is None else kept
