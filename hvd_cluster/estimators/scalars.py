"""TensorBoard's scalars of a run, in the store's log folder, where TensorBoard is installed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvd_cluster.estimators.spec import TrainSpec

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def scalar_log(spec: TrainSpec) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """A function that writes one epoch's record; None where TensorBoard or a local log folder is missing."""
    folder = spec.store.get_logs_path(spec.run_id)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield None
        return
    if folder is None or not Path(folder).is_absolute():  # TensorBoard's writer knows local files only
        yield None
        return
    writer = SummaryWriter(folder)

    def log(record: dict[str, Any]) -> None:
        for part in ("train", "validation"):
            for name, value in flat(record.get(part, {})).items():
                writer.add_scalar(f"{name}/{part}", value, record["epoch"])
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


def flat(part: dict[str, Any]) -> dict[str, float]:
    """The loss and all metrics of the "train" or "validation" part of a record, by name."""
    found = {"loss": part["loss"]} if "loss" in part else {}
    for group in part.get("all_metrics", []):
        found.update(group)
    return found
