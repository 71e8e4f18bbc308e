"""Identify a run's data, so that a later fit does not resume with other data."""

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
    """The columns, number of rows and snapshot of a run's data.

    No row is read: files with an equal fingerprint may have other values.
    """

    feature_cols: list[str]
    label_cols: list[str]
    #: Kind, dtype and shape of each column that workers read, by name.
    columns: dict[str, str]
    #: Training and validation rows together: the split may change between fits.
    rows: int
    #: The state of the table that the rows are from; "" if it is of a format that has no such states.
    snapshot: str = ""

    @classmethod
    def of(cls, dataset: Dataset, inputs: Inputs) -> Fingerprint:
        return cls(
            feature_cols=list(inputs.feature_cols),
            label_cols=list(inputs.label_cols),
            columns={column.name: _described(column) for column in dataset.schema},
            rows=dataset.train.rows + (dataset.validation.rows if dataset.validation is not None else 0),
            snapshot="" if dataset.train.snapshot is None else dataset.train.snapshot.key,
        )

    def differences(self, now: Fingerprint) -> list[str]:
        """How ``now`` differs from this earlier fingerprint, in words."""
        found = [
            f"{name} were {getattr(self, name)} and are {getattr(now, name)}"
            for name in ("feature_cols", "label_cols")
            if getattr(self, name) != getattr(now, name)
        ]
        found += [
            f"column {name!r} was {column} and is {now.columns[name]}"
            for name, column in self.columns.items()
            if now.columns.get(name, column) != column
        ]
        found += [f"column {name!r} is gone" for name in self.columns if name not in now.columns]
        found += [f"column {name!r} is new" for name in now.columns if name not in self.columns]
        if self.rows != now.rows:
            found.append(f"the data had {self.rows} rows and has {now.rows}")
        if self.snapshot != now.snapshot:
            was, new = self.snapshot or "no table with versions", now.snapshot or "no table with versions"
            found.append(f"the data was {was} and is {new}: open_table(table, version=...) reads an earlier version")
        return found

    def require(self, run_id: str, now: Fingerprint) -> None:
        """Check that ``now`` is the data of run ``run_id``, which has this fingerprint.

        Raises:
            DataError: they differ; the text says how.
        """
        if differences := self.differences(now):
            raise DataError(
                f"run_id={run_id!r} has a checkpoint of a fit on other data ({'; '.join(differences)}): choose another "
                "run_id, or none, to train again"
            )

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def _described(column: Column) -> str:
    return f"{column.kind.value} {column.dtype}{list(column.shape) if column.shape else ''}"
