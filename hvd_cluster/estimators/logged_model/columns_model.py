"""A model as MLflow scores it: columns in, output columns out.

It runs without hvd_cluster, from a copy of this module.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.estimators.scoring.scorer import Scorer

#: The file in the folder of an MLflow model that holds its :class:`ColumnsScoring`.
FILE = "scoring.pkl"
#: The package of this module and of what it imports: hvd_cluster, or its copy in a model.
_PACKAGE = __name__.removesuffix(".estimators.logged_model.columns_model")


@dataclass(frozen=True, kw_only=True)
class ColumnsScoring:
    """How the model of an MLflow model is loaded and called."""

    scorer: Scorer
    #: fn(folder of the MLflow model) -> the model.
    load: Callable[[str], Any]
    #: The user's fn(model, row) -> predictions, if a subclass has one.
    predict_fn: Callable[[Any, Any], Any] | None


class ColumnsModel:
    """What ``mlflow.pyfunc.load_model`` calls."""

    def __init__(self, scoring: ColumnsScoring, model: Any) -> None:
        self._scoring = scoring
        self._model = model

    def get_raw_model(self) -> Any:
        """The model itself; ``unwrap_python_model`` of MLflow's returns it."""
        return self._model

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """The output columns of ``transform``, with a row for each row of ``data``.

        Args:
            data: the feature columns, and perhaps others, as a DataFrame or what pandas makes one of.
            params: not used.

        Raises:
            DataError: as ``transform``; also a ValueError.
        """
        frame = data if isinstance(data, pd.DataFrame) else pd.DataFrame(data)
        scorer = self._scoring.scorer
        if self._scoring.predict_fn is not None:
            columns = scorer.score_rows(self._model, self._scoring.predict_fn, frame.to_dict("records"))
        else:
            table = to_table(frame, list(scorer.inputs.feature_cols)).combine_chunks()
            columns = scorer.score(self._model, table).columns
        named = zip((column.name for column in scorer.columns), columns, strict=True)
        return pd.DataFrame(index=frame.index).assign(**{name: column.to_pandas().array for name, column in named})


class _Unpickler(pickle.Unpickler):
    """Finds classes and functions of hvd_cluster in the copy."""

    def find_class(self, module: str, name: str) -> Any:
        parent, _, rest = module.partition(".")
        if parent == "hvd_cluster" and _exists(f"{_PACKAGE}.{rest}"):
            module = f"{_PACKAGE}.{rest}"
        return super().find_class(module, name)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor does its package
        return False


def _load_pyfunc(path: str) -> ColumnsModel:
    """What MLflow calls with the folder of a model."""
    with (Path(path) / FILE).open("rb") as file:
        scoring: ColumnsScoring = _Unpickler(file).load()
    return ColumnsModel(scoring, scoring.load(path))
