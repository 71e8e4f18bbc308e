"""TensorBoard scalars of a run, in the store's log folder, if it is installed.

Its writer supports local files only: for other stores it writes to a local folder, which is copied after each epoch.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvd_cluster.estimators.spec import FitSpec
from hvd_cluster.estimators.view.history import flat

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def scalar_log(spec: FitSpec) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """A function to write an epoch's record; None without TensorBoard or log folder."""
    if not spec.store.saving_runs() or spec.store_on_driver:
        yield None
        return
    sync = spec.store.sync_fn(spec.run_id)
    with spec.store.get_local_output_dir_fn(spec.run_id)() as folder, without_tensorflow():
        try:
            writer = _writer(str(Path(folder, spec.store.get_logs_subdir())))
        except OSError as error:
            logger.warning("the scalars of run %r cannot be written to %s: %s", spec.run_id, folder, error)
            writer = None
        # Not yielded in the except clause: every error of the training would have this one as its context.
        if writer is None:
            yield None
            return

        has_failed = False

        def write(record: dict[str, Any] | None) -> None:
            """Write an epoch's record; None closes the writer."""
            nonlocal has_failed
            if has_failed:
                return
            try:
                if record is None:
                    writer.close()
                    return
                for part in ("train", "validation"):
                    for name, value in flat(record.get(part, {})).items():
                        writer.add_scalar(f"{name}/{part}", value, record["epoch"])
                writer.flush()
                sync(folder)
            except OSError as error:  # such as a full disk, which must not end the fit
                has_failed = True
                text = "the scalars of run %r cannot be written to %s, and are no longer written: %s"
                logger.warning(text, spec.run_id, folder, error)

        try:
            yield write
        finally:
            write(None)


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """Keep TensorBoard from a needless import of TensorFlow, which takes seconds.

    TensorBoard does without TensorFlow if the module ``tensorboard.compat.notf`` exists.
    """
    name = "tensorboard.compat.notf"
    if "tensorflow" in sys.modules or name in sys.modules:
        yield
        return
    sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


def _writer(folder: str) -> Any:
    """TensorBoard's writer, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder)
