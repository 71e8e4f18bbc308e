"""When a fit stops before its last epoch, and which epoch was the best: functions of the history alone.

So every rank decides alike, and a resumed run as an undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.view.history import rows


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End the fit when a number of the history has not become better for a while.

    Raises:
        ValueError: a value makes no sense.
    """

    #: A column of ``model.history``, such as "validation_loss"; None: the validation's loss, or the training's where
    #: there is no validation.
    monitor: str | None = None
    #: Epochs without a better value after which the fit ends.
    patience: int = 3
    #: A value that is better by less than this does not count.
    min_delta: float = 0.0
    #: Whether less or more is better.
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"early stopping with patience={self.patience}: it must be at least 1")
        if self.min_delta < 0:
            raise ValueError(f"early stopping with min_delta={self.min_delta}: it must not be negative")
        if self.mode not in ("min", "max"):
            raise ValueError(f"early stopping with mode={self.mode!r}: it must be 'min' or 'max'")

    def is_over(self, records: Sequence[dict[str, Any]]) -> bool:
        """Whether the last ``patience`` epochs were no better than the best before them."""
        return len(records) - 1 - self.best_epoch(records) >= self.patience

    def best_epoch(self, records: Sequence[dict[str, Any]]) -> int:
        """Index of the best record, the earliest of equal ones; -1 where there is none.

        Raises:
            DataError: the history has no such number.
        """
        best, at = math.inf, -1
        for index, row in enumerate(rows(records)):
            value = self._value(row) * (1 if self.mode == "min" else -1)
            if at < 0 or value < best - self.min_delta:
                best, at = (value, index) if not math.isnan(value) else (best, max(at, 0))
        return at

    def _value(self, row: dict[str, Any]) -> float:
        name = self.monitor or ("validation_loss" if "validation_loss" in row else "train_loss")
        if name not in row:
            raise DataError(f"monitor={name!r} is not in the history, which has {', '.join(row)}: choose one of these")
        return float(row[name])


#: Which epoch is the best where nothing was said of it.
DEFAULT = EarlyStopping()
