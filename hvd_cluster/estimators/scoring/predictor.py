"""A class that scores batches in long-lived processes.

Examples are the actors of Ray Data and the replicas of Ray Serve.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import each_column
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.scoring.scorer import Scored
from hvd_cluster.estimators.scoring.shipped_model import Scoring
from hvd_cluster.launch.pickling import loads


def predictor_of(scoring: bytes) -> type[Any]:
    """The class whose instances load a pickled :class:`Scoring`."""

    class Predictor:
        """Scores batches."""

        def __init__(self) -> None:
            self._scoring: Scoring = loads(scoring)

        def __call__(self, batch: Any) -> Any:
            """A DataFrame, an Arrow table or a dict of arrays, with the output columns added."""
            return with_outputs(self._scoring, batch)

    return Predictor


def with_outputs(scoring: Scoring, batch: Any) -> Any:
    """A batch with the output columns added, in the type that it has.

    Args:
        batch: n rows as a pandas DataFrame, a pyarrow Table, or a dict of arrays of shape (n, ...).

    Raises:
        DataError: the batch is of another type, or a feature column is missing, there twice or cannot be scored.
    """
    scorer = scoring.scorer
    if isinstance(batch, load_pyarrow().Table):
        return scorer.appended(_scored(scoring, batch), batch)
    import pandas as pd

    if not isinstance(batch, (dict, pd.DataFrame)):
        raise DataError(
            f"the batch is a {type(batch).__module__}.{type(batch).__qualname__}: give a pandas DataFrame, a pyarrow "
            "Table or a dict of arrays; pandas.DataFrame(records) makes one of a list of records"
        )
    frame = pd.DataFrame({name: list(values) for name, values in batch.items()}) if isinstance(batch, dict) else batch
    scored = _scored(scoring, frame)
    named = dict(zip((column.name for column in scorer.columns), scored.columns, strict=True))
    if isinstance(batch, dict):
        kept = batch if scored.kept is None else {name: values[scored.kept] for name, values in batch.items()}
        return {**kept, **{name: _array(values) for name, values in named.items()}}
    frame = frame if scored.kept is None else frame.iloc[scored.kept]
    return frame.assign(**{name: values.to_pandas().array for name, values in named.items()})


def _scored(scoring: Scoring, data: Any) -> Scored:
    """Score a DataFrame or an Arrow table, through the user's row function if any."""
    scorer, is_table = scoring.scorer, isinstance(data, load_pyarrow().Table)
    if scoring.predict_fn is not None:
        records = data.to_pylist() if is_table else data.to_dict("records")
        return Scored(scorer.score_rows(scoring.model, scoring.predict_fn, records))
    if is_table and (problems := each_column(scorer.inputs.feature_cols, data.column_names, str)[1]):
        raise DataError("\n".join(problems))
    table = data if is_table else to_table(data, list(scorer.inputs.feature_cols))
    return scorer.score(scoring.model, table.combine_chunks())


def _array(values: Any) -> Any:
    """An output column as an array; rows of one length as a matrix."""
    array = values.to_numpy(zero_copy_only=False)
    return np.stack(array) if array.dtype == object and len(array) and not values.null_count else array
