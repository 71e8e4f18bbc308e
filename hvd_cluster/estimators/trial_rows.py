"""A few rows to try a model on, as its workers will get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.schema import missing_columns_text
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import torch

    from hvd_cluster.estimators.spec import Inputs

#: Rows of the batch that the model and the loss are tried on.
_MAX_ROWS = 8


def trial_rows(
    dataset: Dataset,
    seed: int,
    *,
    required: Sequence[str],
    transformation_fn: Callable[[dict[str, Any]], dict[str, Any]] | None,
    preprocess: Preprocess | None,
    scored_as: Inputs | None = None,
) -> dict[str, torch.Tensor]:
    """The first rows of the training data, as a batch.

    Args:
        required: columns that the batch must have.
        transformation_fn, preprocess: applied to the rows.
        scored_as: the inputs of a model, to call ``preprocess`` as for its scoring instead of its training.

    Raises:
        DataError: ``preprocess`` or ``transformation_fn`` failed, or the latter removed columns that are needed.
    """
    if preprocess is not None:
        made = None if scored_as is None else scored_as.made
        preprocess = dataclasses.replace(preprocess, training=scored_as is None, made=made)
    reader = ParquetReader(
        dataset.train,
        dataset.schema,
        dataset.store,
        batch_size=min(_MAX_ROWS, dataset.train.rows),
        seed=seed,
        shuffle=False,
        remainder="pad",
        transformation_fn=transformation_fn,
        preprocess=preprocess,
        num_threads=1,
    )
    found = next(reader.epoch(0))
    lost = [name for name in required if name not in found]
    if lost:
        raise DataError(f"the rows of transformation_fn lack columns: {missing_columns_text(lost, list(found))}")
    return found
