"""The history of a fit as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_cluster.errors import MissingExtraError


def rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A flat dict for each epoch: ``epoch``, ``train_loss``, ``validation_loss``, ``train_<metric>``, ...,
    ``samples_per_s`` (all ranks together), ``data_wait_share`` (the largest of the ranks), ``seconds``."""
    found = []
    for record in records:
        row: dict[str, Any] = {"epoch": record["epoch"]}
        for part in ("train", "validation"):
            row.update({f"{part}_{name}": value for name, value in flat(record.get(part, {})).items()})
        if "samples_per_s" in record:
            row["samples_per_s"] = sum(record["samples_per_s"])
            row["data_wait_share"] = max(record["data_wait_share"])
            row["seconds"] = record["seconds"]
        found.append(row)
    return found


def flat(part: dict[str, Any]) -> dict[str, float]:
    """The loss and all metrics of the "train" or "validation" part of a record, by name."""
    found = {"loss": part["loss"]} if "loss" in part else {}
    for group in part.get("all_metrics", []):
        found.update(group)
    return found


def frame(records: Sequence[dict[str, Any]]) -> Any:
    """The same as a pandas DataFrame, one row for each epoch.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError(
            "pandas", "data", "to show the history as a table; getHistory() gives plain lists"
        ) from error
    return pd.DataFrame(rows(records))
