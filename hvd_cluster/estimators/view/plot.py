"""A fit's history as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_cluster.errors import MissingExtraError
from hvd_cluster.estimators.view.history import rows


def draw(records: Sequence[dict[str, Any]], ax: Any = None) -> Any:
    """Draw the training and validation loss over the epochs; returns the axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise MissingExtraError("matplotlib", "plot", "to draw the history") from error
        _, ax = plt.subplots()
    table = rows(records)
    for part in ("train", "validation"):
        points = [(row["epoch"], row[f"{part}_loss"]) for row in table if f"{part}_loss" in row]
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", label=part)
    ax.set_xlabel("epoch")
    ax.set_ylabel("loss")
    if table:
        ax.legend()
    return ax
