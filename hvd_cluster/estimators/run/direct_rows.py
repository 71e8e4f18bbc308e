"""Rows sent to workers without a store: each machine gets the others' rows once.

Each worker then reads a complete data set from its own disk, in the order of a data set in a store: which rank reads
which row does not depend on how the rows arrived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.writing import part_transfer
from hvd_cluster.data.writing.part_file import PartPlan
from hvd_cluster.estimators.run.world import Collectives, reporting_steps
from hvd_cluster.launch import progress
from hvd_cluster.settings import Settings

if TYPE_CHECKING:
    from hvd_cluster.spark.task_function import Rows

logger = logging.getLogger(__name__)

_CHANGED_TEXT = (
    "Spark computed other rows, or another order of rows, for the restarted workers: training restarts. A shuffle or a "
    "random function can change the order; write the DataFrame to Parquet first, or give the fit a store"
)
#: Bytes per broadcast.
_PIECE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class DirectRows:
    """Rows that a backend sends to workers, which make a data set of them."""

    plan: PartPlan
    lanes: int
    #: The argument of the backend.
    rows: Rows

    def wrapped(self, train_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``train_fn``, after the workers have gathered the rows from their machines."""
        return _TrainOnDirectRows(train_fn, self.plan, self.lanes)

    def release(self) -> None:
        """Free the rows that were persisted for restarts."""
        self.rows.frame.unpersist()


@dataclass(frozen=True)
class _TrainOnDirectRows:
    train_fn: Callable[[Any], Any]
    plan: PartPlan
    lanes: int

    def __call__(self, spec: Any) -> Any:
        import hvd_cluster.torch as hvd

        with reporting_steps():
            hvd.init()
        try:
            folder = Settings.from_env().rows_dir
            dataset, digest = gather_rows(folder, self.plan, self.lanes, cast("Collectives", hvd))
            if hvd.rank() == 0:
                progress.report(data_digest=digest)
            if spec.resume is not None and digest != spec.data_digest:
                logger.warning("%s", _CHANGED_TEXT)
                spec = dataclasses.replace(spec, resume=None, resume_best=None)
            result = self.train_fn(dataclasses.replace(spec, dataset=dataset))
            hvd.barrier()  # no rank's files are deleted while another rank reads them
            return result
        finally:
            hvd.shutdown()


def gather_rows(folder: str, plan: PartPlan, lanes: int, hvd: Collectives) -> tuple[Dataset, str]:
    """The data set of all workers' rows and its digest, the same on every rank.

    Args:
        folder: where this worker's rows are. Files of other machines are copied into the folder of one worker per
            machine.

    Raises:
        DataError: the rows cannot be trained on; raised on every rank.
    """
    with _token(folder) as token:
        mine = (folder, token, part_transfer.files_in(folder), part_transfer.reports_in(folder))
        owners = hvd.allgather_object(mine, name="hvd_cluster.arrived")
        visible = [Path(place, name).exists() for place, name, _, _ in owners]
        seen = hvd.allgather_object(visible, name="hvd_cluster.visible")
    leader = visible.index(True)
    inbox = owners[leader][0]
    folder_of: dict[str, str] = {}
    for owner, (place, _, files, _) in enumerate(owners):
        if place in [one[0] for one in owners[:owner]]:  # workers of one task share a folder
            continue
        folder_of.update(dict.fromkeys(files, place if visible[owner] else inbox))
        if not all(row[owner] for row in seen):
            copies = not visible[owner] and leader == hvd.rank()
            _broadcast(place, files, owner, Path(inbox) if copies else None, hvd)
    hvd.barrier()
    reports = {name: report for _, _, _, some in owners for name, report in some.items()}
    dataset = part_transfer.assembled(plan, reports.values(), folder_of, lanes)
    return dataset, part_transfer.digest(reports)


def _broadcast(place: str, files: dict[str, int], owner: int, inbox: Path | None, hvd: Collectives) -> None:
    """Send rank ``owner``'s files to all; ranks with an ``inbox`` write them there."""
    for name, size in files.items():
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(Path(place, name).open("rb")) if hvd.rank() == owner else None
            sink = stack.enter_context((inbox / name).open("wb")) if inbox is not None else None
            for start in range(0, size, _PIECE_BYTES):
                length = min(_PIECE_BYTES, size - start)
                if source is not None:
                    piece = torch.frombuffer(bytearray(source.read(length)), dtype=torch.uint8)
                else:
                    piece = torch.empty(length, dtype=torch.uint8)
                received = hvd.broadcast(piece, root_rank=owner, name="hvd_cluster.rows")
                if sink is not None:
                    sink.write(received.numpy().tobytes())


@contextlib.contextmanager
def _token(folder: str) -> Iterator[str]:
    """A file that shows whether workers see this folder; host names are unreliable."""
    token = Path(folder, f"token-{uuid.uuid4().hex}")
    token.touch()
    try:
        yield token.name
    finally:
        token.unlink()
