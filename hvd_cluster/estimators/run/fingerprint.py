"""What a run was trained on, as far as a later fit can tell whether it goes on with the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.schema import Column
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import Inputs


@dataclass(frozen=True)
class Fingerprint:
    """Columns and rows of a run. Equal ones may still hold other values: no row is read for it."""

    feature_cols: list[str]
    label_cols: list[str]
    #: Kind, dtype and shape of each column that workers read, by name.
    columns: dict[str, str]
    #: Rows for training and validation together: how they are shared out may change between fits.
    rows: int

    @classmethod
    def of(cls, dataset: Dataset, inputs: Inputs) -> Fingerprint:
        return cls(
            feature_cols=list(inputs.feature_cols),
            label_cols=list(inputs.label_cols),
            columns={column.name: _described(column) for column in dataset.schema},
            rows=dataset.train.rows + (dataset.validation.rows if dataset.validation is not None else 0),
        )

    def differences(self, now: Fingerprint) -> list[str]:
        """How ``now`` differs from this earlier one, in words; empty if it does not."""
        found = []
        if self.feature_cols != now.feature_cols:
            found.append(f"feature_cols were {self.feature_cols} and are {now.feature_cols}")
        if self.label_cols != now.label_cols:
            found.append(f"label_cols were {self.label_cols} and are {now.label_cols}")
        both = [name for name in self.columns if name in now.columns]
        found += [
            f"column {name!r} was {self.columns[name]} and is {now.columns[name]}"
            for name in both
            if self.columns[name] != now.columns[name]
        ]
        found += _others("is gone", self.columns, now.columns) + _others("is new", now.columns, self.columns)
        if self.rows != now.rows:
            found.append(f"the data had {self.rows} rows and has {now.rows}")
        return found

    def require(self, run_id: str, now: Fingerprint) -> None:
        """Check that a fit goes on with the data that the run ``run_id`` began with, which is this.

        Raises:
            DataError: it differs; the text says in what.
        """
        if differences := self.differences(now):
            raise DataError(
                f"run_id={run_id!r} has a checkpoint of a fit on other data ({'; '.join(differences)}): choose another "
                "run_id, or none, to train anew"
            )

    def to_dict(self) -> dict[str, object]:
        """Plain data, which JSON gives back as it was."""
        return dataclasses.asdict(self)


def _described(column: Column) -> str:
    return f"{column.kind.value} {column.dtype}{list(column.shape) if column.shape else ''}"


def _others(what: str, some: dict[str, str], others: dict[str, str]) -> list[str]:
    return [f"column {name!r} {what}" for name in some if name not in others]
