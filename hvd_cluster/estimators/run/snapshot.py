"""A run's state after an epoch, where a framework has a file format of its own for model and optimizer."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec

_BODY, _RUN = "state", "run.json"


@dataclass(frozen=True)
class Snapshot:
    """What resuming takes; in the store an uncompressed zip file of two members, ``state`` and ``run.json``."""

    #: The framework's own file.
    body: bytes = field(repr=False)
    history: list[dict[str, Any]]
    #: The number of workers.
    size: int
    #: What it was trained on.
    trained_on: Fingerprint
    #: The epochs that were asked for, where a callback ended the fit; None where none did.
    stopped_of: int | None = None

    @property
    def epochs(self) -> int:
        """Finished epochs."""
        return len(self.history)

    def is_over(self, spec: FitSpec) -> bool:
        """Whether nothing is left to train."""
        return self.epochs >= spec.epochs or self.is_stopped(spec)

    def is_stopped(self, spec: FitSpec) -> bool:
        """Whether a callback has ended the fit; it goes on where other ``epochs`` are asked for."""
        return self.stopped_of == spec.epochs

    def require_data(self, run_id: str, now: Fingerprint) -> None:
        """Check that a fit goes on with the data that the run began with.

        Raises:
            DataError: it differs; the text says in what.
        """
        self.trained_on.require(run_id, now)

    def to_bytes(self) -> bytes:
        run = {
            "history": self.history,
            "size": self.size,
            "trained_on": self.trained_on.to_dict(),
            "stopped_of": self.stopped_of,
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_BODY, self.body)
            archive.writestr(_RUN, json.dumps(run))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, blob: bytes, origin: str) -> Snapshot:
        """Read what :meth:`to_bytes` wrote.

        Raises:
            DataError: ``origin`` holds something else.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(blob)) as archive:
                body, run = archive.read(_BODY), json.loads(archive.read(_RUN))
            return cls(body, run["history"], run["size"], Fingerprint(**run["trained_on"]), run.get("stopped_of"))
        except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{origin} is not a checkpoint of this run ({error}): delete it, or choose another run_id"
            ) from error

    @classmethod
    def load(cls, files: RunFiles) -> Snapshot | None:
        """The run's last one, or None."""
        blob = files.last()
        return None if blob is None else cls.from_bytes(blob, f"the checkpoint of run {files.run_id!r}")

    @classmethod
    def shared(cls, files: RunFiles, hvd: Any) -> Snapshot | None:
        """The run's last one as rank 0 sees it, on every rank; or None."""
        blob = hvd.broadcast_object(files.last() if hvd.rank() == 0 else None, name="hvd_cluster.resume")
        return None if blob is None else cls.from_bytes(blob, f"the checkpoint of run {files.run_id!r}")
