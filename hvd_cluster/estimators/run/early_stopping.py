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
        patience: epochs without a better value that end the fit. Epochs without any value do not count.
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
        """Whether the last ``patience`` monitored epochs did not beat the best before."""
        best = self.best_epoch(records)
        return sum(index > best for index, _ in self._values(records)) >= self.patience

    def best_epoch(self, records: Sequence[dict[str, Any]]) -> int:
        """Index of the best record, the earliest of equals; -1 without records.

        Epochs without the monitored number, such as those without a validation, are not the best.

        Raises:
            DataError: ``monitor`` is not in the history.
        """
        best, at = math.inf, -1
        for index, given in self._values(records):
            value = given * (-1 if self.mode == "max" else 1)
            if at < 0 or value < best - self.min_delta:
                best, at = (best if math.isnan(value) else value), index
        return at

    def _values(self, records: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
        """The indices of the records with the monitored number, and that number."""
        table = rows(records)
        has_validation = any("validation_loss" in row for row in table)
        name = self.monitor or ("validation_loss" if has_validation else "train_loss")
        found = [(index, float(row[name])) for index, row in enumerate(table) if name in row]
        if table and not found:
            known = dict.fromkeys(column for row in table for column in row)
            raise DataError(
                f"monitor={name!r} is not in the history, which has {', '.join(known)}: choose one of these"
            )
        return found


#: Finds the best epoch if ``early_stopping`` is not set.
DEFAULT = EarlyStopping()
