"""The role of each column by an estimator's params, and the check of these."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.schema import missing_columns_text
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.stages.stage import PipelineStage
from hvd_cluster.launch.call import pack

#: Params that name columns.
_LISTS_OF_COLUMNS = ("feature_cols", "label_cols", "continuous_cols", "categorical_cols")
#: Params that are not sent to workers.
_DRIVER_PARAMS = ("store", "driver_callbacks")


class ColumnRoles(PipelineStage):
    """The part of an estimator that deals with columns."""

    @abstractmethod
    def _mistakes(self) -> list[str]:
        """Problems of the params of this framework, each with its remedy."""

    def _inputs(self, dataset: Dataset) -> Inputs:
        """The columns of ``dataset`` by role; the trial of the model adds the dtypes."""
        return Inputs(
            feature_cols=tuple(self._feature_columns(list(dataset.schema.names))),
            label_cols=tuple(self._value("label_cols")),
            sample_weight_col=self._value("sample_weight_col"),
        )

    def _feature_columns(self, names: list[str]) -> list[str]:
        """``feature_cols``, or all columns without another role."""
        if self._value("feature_cols") is not None:
            return list(self._value("feature_cols"))
        others = {*(self._value("label_cols") or []), self._value("sample_weight_col"), self._value("validation")}
        return [name for name in names if name not in others]

    def _columns(self, names: list[str]) -> list[str]:
        """The columns that workers read, each once."""
        more = [name for one in ("continuous_cols", "categorical_cols") for name in self._value(one) or []]
        return list(dict.fromkeys([*self._feature_columns(names), *self._stored_columns(), *more]))

    def _stored_columns(self) -> list[str]:
        """The label columns and the weight: the loss gets them as they are stored."""
        weight = self._value("sample_weight_col")
        return [*(self._value("label_cols") or []), *([weight] if weight else [])]

    def _raw_columns(self, names: list[str]) -> list[str]:
        """The columns that only ``preprocess`` gets, so that they may hold anything."""
        if self._value("preprocess") is None:
            return []
        return [name for name in self._feature_columns(names) if name not in self._stored_columns()]

    def _check(self, names: list[str], has_validation: bool) -> None:
        """Check the params and the columns, and report all problems at once.

        Args:
            names: the columns of the data.
            has_validation: the validation rows are separate already, without a column that marks them.

        Raises:
            ValueError: something is wrong.
        """
        wrong = [
            f"{row.name}=None: give a value; the default is {row.default!r}"
            for row in self.param_rows.values()
            if not row.optional and self._value(row.name) is None
        ]
        if self._value("backend") is not None and self._value("num_proc") is not None:
            wrong.append('At most one of parameters "backend" and "num_proc" may be specified')
        if not self._value("label_cols"):
            wrong.append("label_cols is required: name the column that the model predicts")
        if self._value("data_module") is None:
            wrong += [
                f"{name} needs a data_module: give one, or name the columns in feature_cols"
                for name in ("continuous_cols", "categorical_cols")
                if self._value(name) is not None
            ]
        if self._value("preprocess") is not None:
            wrong += [
                f"{name} and preprocess exclude each other: preprocess makes the model's arguments of the feature "
                "columns"
                for name in ("transformation_fn", "data_module", "input_shapes")
                if name in self.param_rows and self._value(name) is not None
            ]
        wrong += self._mistakes()
        named = [name for one in _LISTS_OF_COLUMNS for name in self._value(one) or []]
        more = ("sample_weight_col",) if has_validation else ("sample_weight_col", "validation")
        named += [self._value(name) for name in more if isinstance(self._value(name), str)]
        missing = [name for name in dict.fromkeys(named) if name not in names]
        if missing:
            wrong.append(missing_columns_text(missing, names))
        elif self._value("label_cols") and not self._feature_columns(names):
            wrong.append("feature_cols: no column is left for the model's input")
        elif self._value("mlflow"):
            outputs = self._value("output_cols") or [f"{name}__output" for name in self._value("label_cols") or []]
            wrong += [
                f"mlflow logs a model that adds {name!r}, which is a feature column: choose another with output_cols"
                for name in outputs
                if name in self._feature_columns(names)
            ]
        if wrong:
            raise ValueError("\n".join(wrong))

    def _check_picklable(self) -> None:
        """Raise if something cannot be sent to the workers, before anything is written."""

        def fit(**params: Any) -> None: ...

        fit.__qualname__ = self._fit_name
        pack(fit, kwargs=self._sent_params())

    @property
    def _fit_name(self) -> str:
        return f"{type(self).__name__}.fit"

    def _sent_params(self) -> dict[str, Any]:
        """The params that are sent to workers."""
        sent = [name for name, row in self.param_rows.items() if row.saved and name not in _DRIVER_PARAMS]
        return {name: self._value(name) for name in sent}

    def _unpickled_params(self) -> dict[str, Any]:
        """The part of them that workers unpickle."""
        return self._sent_params()


def as_group(value: Any, count: int) -> tuple[Any, ...]:
    """One value for each label column; a single value stands for all."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * count


def wrong_counts(lists: dict[str, Any], count: int, of: str) -> list[str]:
    """A message for each of ``lists`` that is neither None nor ``count`` long."""
    return [
        f"{name} has {len(value)} entries for {count} {of}: give one for each"
        for name, value in lists.items()
        if isinstance(value, (list, tuple)) and len(value) != count
    ]
