"""A run's state after or within an epoch, where a framework has a file format of its own for model and optimizer."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.schedule import steps_of_rows
from hvd_cluster.estimators.run.world import Collectives

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec

_BODY, _RUN, _RANK = "state", "run.json", "rank."


@dataclass(frozen=True)
class Running:
    """How far an epoch has come, for a snapshot within it."""

    #: Rows of the epoch that all ranks together have trained on.
    rows: int
    #: By rank, what that one alone holds, such as its random generators, in the framework's own format.
    ranks: list[bytes] = field(repr=False)

    @classmethod
    def after(cls, done: int, spec: FitSpec, hvd: Collectives, mine: bytes) -> Running:
        """After ``done`` steps of an epoch; every rank takes part."""
        return cls(
            rows=done * spec.batch_size * hvd.size(),
            ranks=hvd.allgather_object(mine, name="hvd_cluster.running"),
        )

    def steps(self, spec: FitSpec, size: int) -> int:
        """Those that ``size`` ranks have behind them."""
        return steps_of_rows(spec, self.rows, size)

    def of(self, rank: int, size: int) -> bytes | None:
        """What rank ``rank`` of ``size`` held; None where that was another number of ranks."""
        return self.ranks[rank] if len(self.ranks) == size else None


@dataclass(frozen=True)
class Snapshot:
    """What resuming takes; in the store an uncompressed zip file.

    Its members are ``state`` and ``run.json``; within an epoch, also ``rank.0``, ``rank.1``, ...
    """

    #: The framework's own file.
    body: bytes = field(repr=False)
    history: list[dict[str, Any]]
    #: The number of workers.
    size: int
    #: What it was trained on.
    trained_on: Fingerprint
    #: The epochs that were asked for, where a callback ended the fit; None where none did.
    stopped_of: int | None = None
    #: Where the next epoch stands; None at its beginning, when random generators are seeded anew.
    running: Running | None = None

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

    def kept_text(self, spec: FitSpec, size: int) -> str:
        """What the run goes on with though the fit was given another; a framework's own file does not tell."""
        return ""

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
            "running_rows": self.running and self.running.rows,
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_BODY, self.body)
            archive.writestr(_RUN, json.dumps(run))
            for rank, mine in enumerate(self.running.ranks if self.running is not None else []):
                archive.writestr(f"{_RANK}{rank}", mine)
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
                running = None
                if (rows := run.get("running_rows")) is not None:
                    running = Running(rows, [archive.read(f"{_RANK}{rank}") for rank in range(run["size"])])
            trained_on = Fingerprint(**run["trained_on"])
            return cls(body, run["history"], run["size"], trained_on, run.get("stopped_of"), running)
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
    def best_of(cls, files: RunFiles, history: Sequence[dict[str, Any]]) -> Snapshot | None:
        """That of the run's best epoch, with the framework's file of it, for a fit that has ``history`` behind it.

        None where there is none, or where it is of a course that was left: a worker that died had come further than its
        last checkpoint.
        """
        blob = files.best()
        if blob is None:
            return None
        try:
            found = cls.from_bytes(blob, "the best checkpoint")
        except DataError:  # a file of before the epoch was kept with it
            return None
        return found if is_of_course(found.history, history) else None

    @classmethod
    def shared(cls, files: RunFiles, hvd: Collectives) -> Snapshot | None:
        """The run's last one as rank 0 sees it, on every rank; or None."""
        blob = hvd.broadcast_object(files.last() if hvd.rank() == 0 else None, name="hvd_cluster.resume")
        return None if blob is None else cls.from_bytes(blob, f"the checkpoint of run {files.run_id!r}")


def is_of_course(epochs: Sequence[dict[str, Any]], history: Sequence[dict[str, Any]]) -> bool:
    """Whether ``history`` begins with those very epochs: no second one takes exactly as long."""
    last = len(epochs) - 1
    return last < len(history) and (last < 0 or epochs[last].get("seconds") == history[last].get("seconds"))
