"""Where workers save checkpoints: in a store they can see, or through the driver."""

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


@dataclass(frozen=True)
class RunFiles:
    """The files of the last and the best checkpoint of a run."""

    store: Store
    run_id: str
    #: Workers cannot see the store: they send checkpoints to the driver, and get earlier ones with the spec.
    on_driver: bool = False
    resume: bytes | None = None
    resume_best: bytes | None = None

    @classmethod
    def of(cls, spec: FitSpec) -> RunFiles:
        """The files of the run of ``spec``."""
        return cls(spec.store, spec.run_id, spec.store_on_driver, spec.resume, spec.resume_best)

    @property
    def are_kept(self) -> bool:
        """Whether the store keeps checkpoints."""
        return self.store.saving_runs()

    @property
    def has_last(self) -> bool:
        """Whether the store has a checkpoint of the run."""
        path = self._path(best=False)
        return path is not None and self.store.exists(path)

    def save(self, blob: bytes, best: bool = False) -> None:
        """Save the last or the best checkpoint; do nothing in a store that keeps no runs.

        Raises:
            DataError: the store cannot be written.
        """
        path = self._path(best)
        if path is None:
            return
        if self.on_driver:
            pieces = [blob[start : start + PIECE_BYTES] for start in range(0, len(blob), PIECE_BYTES)]
            for index, piece in enumerate(pieces):
                text = base64.b64encode(piece).decode()
                progress.report(checkpoint=text, best=best, piece=index, pieces=len(pieces))
            return
        try:
            self.store.write(path, blob)
        except OSError as error:
            raise DataError(unwritable_text(path, error)) from error

    def last(self) -> bytes | None:
        """The last checkpoint, or None."""
        return self.resume if self.on_driver else self._read(best=False)

    def best(self) -> bytes | None:
        """The best checkpoint, or None."""
        return self.resume_best if self.on_driver else self._read(best=True)

    def _read(self, best: bool) -> bytes | None:
        path = self._path(best)
        return None if path is None or not self.store.exists(path) else self.store.read(path)

    def _path(self, best: bool) -> str | None:
        """None in a store that keeps no runs."""
        path = self.store.get_checkpoint_path(self.run_id)
        return path + ".best" if best and path is not None else path


class ReceivedFiles:
    """The driver's assembly of checkpoints that workers send, saved to ``files``."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        #: Of the last and of the best checkpoint.
        self._pieces: dict[bool, list[bytes]] = {False: [], True: []}

    def add(self, fields: Mapping[str, Any]) -> None:
        """Take a piece; save a checkpoint once complete, never if its worker died before."""
        pieces = self._pieces[fields["best"]]
        if fields["piece"] == 0:
            pieces.clear()
        if len(pieces) == fields["piece"]:
            pieces.append(base64.b64decode(fields["checkpoint"]))
            if len(pieces) == fields["pieces"]:
                self._files.save(b"".join(pieces), fields["best"])
                pieces.clear()


def keep_with_run(spec: FitSpec, folder: str) -> None:
    """Copy a :func:`local_folder` to the run's folder, if the store keeps runs."""
    if not spec.store_on_driver and spec.store.saving_runs():
        spec.store.sync_fn(spec.run_id)(folder)


@contextlib.contextmanager
def local_folder(spec: FitSpec) -> Iterator[str]:
    """A local folder for the files of a framework's callbacks and loggers.

    It is the run's folder if the store is local.
    """
    if spec.store_on_driver or not spec.store.saving_runs():
        with scratch_folder("run") as folder:
            yield folder
        return
    with spec.store.get_local_output_dir_fn(spec.run_id)() as folder:
        yield folder
