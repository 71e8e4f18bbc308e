"""Warns about a loss that is not finite: the fit would end normally, with a useless model."""

from __future__ import annotations

import logging
import math
from typing import Any

logger = logging.getLogger(__name__)

_PARTS = {"train": "training", "validation": "validation"}


class LossWatch:
    """Warns once, at the first epoch whose loss is not a finite number; called as ``watch(record)``.

    Args:
        run_id: the name of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._has_warned = False

    def __call__(self, record: dict[str, Any]) -> None:
        losses = {name: record.get(part, {}).get("loss", 0.0) for part, name in _PARTS.items()}
        found = [f"the {name} loss is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        if found and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "run %r: in epoch %d %s. Look for NaN, infinite or very large numbers in the columns (a date or time "
                "is one large number), and try a lower learning rate",
                self._run_id,
                record["epoch"],
                " and ".join(found),
            )
