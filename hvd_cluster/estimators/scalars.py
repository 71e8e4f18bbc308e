"""TensorBoard's scalars of a run, in the store's log folder, where TensorBoard is installed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvd_cluster.estimators.history import flat
from hvd_cluster.estimators.spec import FitSpec

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def scalar_log(spec: FitSpec) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """A function that writes one epoch's record; None where TensorBoard or a local log folder is missing."""
    folder = spec.store.get_logs_path(spec.run_id)
    # TensorBoard's writer knows local files only.
    writer = _writer(folder) if folder is not None and Path(folder).is_absolute() else None
    # Not yielded while the import's failure is handled: every error of the training would carry it as its context.
    if writer is None:
        yield None
        return

    def log(record: dict[str, Any]) -> None:
        for part in ("train", "validation"):
            for name, value in flat(record.get(part, {})).items():
                writer.add_scalar(f"{name}/{part}", value, record["epoch"])
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


def _writer(folder: str) -> Any:
    """TensorBoard's writer, or None where TensorBoard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder)
