"""Where a run's checkpoints are, seen from a worker: in the store, or with the driver where workers see no store."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.files.filesystems import unwritable_text
from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.launch import progress

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec

#: A message to the driver holds at most this much of a checkpoint.
PIECE_BYTES = 1 << 20
#: Behind the checkpoint's name: that of the best epoch.
BEST = ".best"


@dataclass(frozen=True)
class RunFiles:
    """The last and the best checkpoint of a run, whatever is in them."""

    store: Store
    run_id: str
    #: Workers do not see the store: what they save travels to the driver, and what was saved came with the spec.
    on_driver: bool = False
    resume: bytes | None = None
    resume_best: bytes | None = None

    @classmethod
    def of(cls, spec: FitSpec) -> RunFiles:
        """Those of the run that ``spec`` tells of."""
        return cls(spec.store, spec.run_id, spec.store_on_driver, spec.resume, spec.resume_best)

    @property
    def are_kept(self) -> bool:
        """Whether there is a place for checkpoints at all."""
        return self.store.saving_runs

    def save(self, blob: bytes, best: bool = False) -> None:
        """Keep a checkpoint as the last one, or as the best; a no-op in a store that keeps no runs.

        Raises:
            DataError: the store cannot be written.
        """
        suffix = BEST if best else ""
        path = path_of(self.store, self.run_id, suffix)
        if path is None:
            return
        if self.on_driver:
            self._send(blob, suffix)
            return
        try:
            self.store.write(path, blob)
        except OSError as error:
            raise DataError(unwritable_text(path, error)) from error

    def last(self) -> bytes | None:
        """The last checkpoint, or None."""
        return self.resume if self.on_driver else read(self.store, self.run_id)

    def best(self) -> bytes | None:
        """The best checkpoint, or None."""
        return self.resume_best if self.on_driver else read(self.store, self.run_id, BEST)

    @staticmethod
    def _send(blob: bytes, suffix: str) -> None:
        pieces = [blob[start : start + PIECE_BYTES] for start in range(0, len(blob), PIECE_BYTES)]
        for index, piece in enumerate(pieces):
            text = base64.b64encode(piece).decode()
            progress.report(checkpoint=text, suffix=suffix, piece=index, pieces=len(pieces))


class ReceivedFiles:
    """The driver's end: puts the checkpoints that workers send together, and keeps them in the driver's own store."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._pieces: dict[str, list[bytes]] = {}

    def add(self, fields: Mapping[str, Any]) -> None:
        """Take a piece. A checkpoint appears when it is whole; one that a dead worker left unfinished is forgotten."""
        suffix = fields["suffix"]
        if fields["piece"] == 0:
            self._pieces[suffix] = []
        pieces = self._pieces.get(suffix, [])
        if len(pieces) != fields["piece"]:
            return
        pieces.append(base64.b64decode(fields["checkpoint"]))
        if len(pieces) == fields["pieces"]:
            path = path_of(self._store, self._run_id, suffix)
            if path is not None:
                self._store.write(path, b"".join(self._pieces.pop(suffix)))


def path_of(store: Store, run_id: str, suffix: str = "") -> str | None:
    """Where a checkpoint is; None in a store that keeps no runs."""
    path = store.get_checkpoint_path(run_id)
    return None if path is None else path + suffix


def read(store: Store, run_id: str, suffix: str = "") -> bytes | None:
    """A checkpoint, or None."""
    path = path_of(store, run_id, suffix)
    return None if path is None or not store.exists(path) else store.read(path)


def keep_with_run(spec: FitSpec, folder: str) -> None:
    """Copy what was written to a folder of :func:`local_folder` to the run's own, where runs are kept."""
    if not spec.store_on_driver and spec.store.saving_runs:
        spec.store.sync_fn(spec.run_id)(folder)


@contextlib.contextmanager
def local_folder(spec: FitSpec) -> Iterator[str]:
    """A local folder for what callbacks and loggers of a framework write: the run's own where the store is local."""
    if spec.store_on_driver or not spec.store.saving_runs:
        with scratch_folder("run") as folder:
            yield folder
        return
    with spec.store.get_local_output_dir_fn(spec.run_id)() as folder:
        yield folder
