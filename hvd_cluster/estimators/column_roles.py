"""What the columns of the data are for, by an estimator's params; and everything that is wrong with these, at once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.schema import missing_columns_text
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.stages.stage import Stage
from hvd_cluster.launch.call import pack

#: Params that name columns.
_LISTS_OF_COLUMNS = ("feature_cols", "label_cols", "continuous_cols", "categorical_cols")
#: Params that workers never see.
_STAY_WITH_DRIVER = ("store", "driver_callbacks")


class ColumnRoles(Stage):
    """The part of an estimator that knows its columns."""

    @abstractmethod
    def _mistakes(self) -> list[str]:
        """What is wrong with the params of this framework, each with its remedy; empty if nothing."""

    def _inputs(self, dataset: Dataset) -> Inputs:
        """The columns of ``dataset`` by what they are for; dtypes are settled by the trial."""
        labels, weight_col = tuple(self._value("label_cols")), self._value("sample_weight_col")
        others = {*labels, weight_col}
        return Inputs(
            feature_cols=tuple(
                self._value("feature_cols") or [name for name in dataset.schema.names if name not in others]
            ),
            label_cols=labels,
            sample_weight_col=weight_col,
        )

    def _feature_columns(self, names: list[str]) -> list[str]:
        """``feature_cols``, or all columns that serve no other purpose."""
        if self._value("feature_cols") is not None:
            return list(self._value("feature_cols"))
        others = {*(self._value("label_cols") or []), self._value("sample_weight_col"), self._value("validation")}
        return [name for name in names if name not in others]

    def _columns(self, names: list[str]) -> list[str]:
        """Every column that workers read, once."""
        weight = [self._value("sample_weight_col")] if self._value("sample_weight_col") else []
        more = [name for one in ("continuous_cols", "categorical_cols") for name in self._value(one) or []]
        return list(dict.fromkeys([*self._feature_columns(names), *self._value("label_cols"), *weight, *more]))

    def _check(self, names: list[str], is_held_out: bool) -> None:
        """Raise for everything that is wrong with the params and the columns, all at once.

        Args:
            names: the columns of the data.
            is_held_out: the validation rows are apart already, and need no column that marks them.
        """
        wrong = [
            f"{row.name}=None: give a value; the default is {row.default!r}"
            for row in self.param_rows.values()
            if not row.optional and self._value(row.name) is None
        ]
        if self._value("backend") is not None and self._value("num_proc") is not None:
            wrong.append('At most one of parameters "backend" and "num_proc" may be specified')
        if not self._value("label_cols"):
            wrong.append("label_cols is required: name the column that the model is to predict")
        if self._value("data_module") is None:
            wrong += [
                f"{name} is for a data_module of your own: give that, or name the columns in feature_cols"
                for name in ("continuous_cols", "categorical_cols")
                if self._value(name) is not None
            ]
        wrong += self._mistakes()
        named = [name for one in _LISTS_OF_COLUMNS for name in self._value(one) or []]
        more = ("sample_weight_col",) if is_held_out else ("sample_weight_col", "validation")
        named += [self._value(name) for name in more if isinstance(self._value(name), str)]
        missing = [name for name in dict.fromkeys(named) if name not in names]
        if missing:
            wrong.append(missing_columns_text(missing, names))
        elif self._value("label_cols") and not self._feature_columns(names):
            wrong.append("feature_cols: no column is left for the model's input")
        if wrong:
            raise ValueError("\n".join(wrong))

    def _read_columns(self, names: list[str]) -> list[str]:
        """Every column that is read from the data: those for workers, and the one that marks validation rows."""
        marks = [self._value("validation")] if isinstance(self._value("validation"), str) else []
        return [*self._columns(names), *marks]

    def _check_picklable(self) -> None:
        """Name what cannot travel to the workers, before anything is written."""

        def fit(**params: Any) -> None: ...

        fit.__qualname__ = self._fit_name
        pack(fit, kwargs=self._sent_params())

    @property
    def _fit_name(self) -> str:
        return f"{type(self).__name__}.fit"

    def _sent_params(self) -> dict[str, Any]:
        """The params that workers get."""
        travels = [name for name, row in self.param_rows.items() if row.saved and name not in _STAY_WITH_DRIVER]
        return {name: self._value(name) for name in travels}

    def _unpickled_params(self) -> dict[str, Any]:
        """What workers unpickle of them."""
        return self._sent_params()


def as_group(value: Any, count: int) -> tuple[Any, ...]:
    """One thing for each label column: a single one stands for all."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * count


def wrong_counts(lists: dict[str, Any], count: int, of: str) -> list[str]:
    """A complaint for each of ``lists`` (None is fine) that has not one entry for each of ``count`` columns."""
    return [
        f"{name} has {len(value)} entries for {count} {of}: give one for each"
        for name, value in lists.items()
        if isinstance(value, (list, tuple)) and len(value) != count
    ]
