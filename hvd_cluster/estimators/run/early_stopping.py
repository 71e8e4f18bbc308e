"""When a fit stops before its last epoch, and which epoch was the best.

Both depend on the history alone, so that all ranks, and resumed runs, decide the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.view.history import rows

#: In names of metrics of which higher values are usually better.
_SCORE = re.compile(r"(?i)(acc|accuracy|auc|auroc|f1|precision|recall|score|r2|iou|bleu|rouge|ndcg)(?![a-z])")


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End the fit when a number in the history has not improved for some epochs.

    Args:
        monitor: a column of ``model.history``, such as "validation_loss"; None for the validation loss, or the training
            loss if there are no validation rows.
        patience: epochs without a better value that end the fit.
        min_delta: smaller improvements do not count.
        mode: "min" if lower values are better, "max" if higher ones are. None means "min", but a monitor named like a
            score needs a choice.

    Raises:
        ValueError: a value is out of range.
    """

    monitor: str | None = None
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"early stopping with patience={self.patience}: it must be at least 1")
        if self.min_delta < 0:
            raise ValueError(f"early stopping with min_delta={self.min_delta}: it must not be negative")
        if self.mode not in ("min", "max", None):
            raise ValueError(f"early stopping with mode={self.mode!r}: it must be 'min' or 'max'")

    def require_monitor(self, metric_names: Sequence[Sequence[str]]) -> None:
        """Check, before a fit with these metrics, that its history will have ``monitor``.

        Raises:
            DataError: it will not.
            ValueError: it is named like a score, and ``mode`` is not given.
        """
        if self.monitor is None or self.monitor.startswith("time_share_"):
            return
        part = {"loss": 0.0, "all_metrics": [dict.fromkeys(group, 0.0) for group in metric_names]}
        numbers = {"seconds": 0.0, "left_out_rows": 0, "validation_left_out_rows": 0}
        lists = {"samples_per_s": [0.0], "data_wait_share": [0.0]}
        self.best_epoch([{"epoch": 0, "train": part, "validation": part, **lists, **numbers}])
        if self.mode is None and _SCORE.search(self.monitor):
            raise ValueError(
                f"early stopping with monitor={self.monitor!r}: say mode='max' if higher values are better, or 'min'"
            )

    def is_over(self, records: Sequence[dict[str, Any]]) -> bool:
        """Whether the last ``patience`` epochs were not better than the best before them."""
        return len(records) - 1 - self.best_epoch(records) >= self.patience

    def best_epoch(self, records: Sequence[dict[str, Any]]) -> int:
        """Index of the best record, the earliest of equal ones; -1 if there are no records.

        Raises:
            DataError: ``monitor`` is not in the history.
        """
        best, at = math.inf, -1
        for index, row in enumerate(rows(records)):
            value = self._value(row) * (-1 if self.mode == "max" else 1)
            if at < 0 or value < best - self.min_delta:
                best, at = (value, index) if not math.isnan(value) else (best, max(at, 0))
        return at

    def _value(self, row: dict[str, Any]) -> float:
        name = self.monitor or ("validation_loss" if "validation_loss" in row else "train_loss")
        if name not in row:
            raise DataError(f"monitor={name!r} is not in the history, which has {', '.join(row)}: choose one of these")
        return float(row[name])


#: Finds the best epoch if ``early_stopping`` is not set.
DEFAULT = EarlyStopping()
