"""A run's state after or within an epoch, from which a later start continues."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.monitor.step_clock import SAVE, step_clock

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


@dataclass(frozen=True)
class PartialEpoch:
    """An epoch that has made some of its steps."""

    #: Rows of the epoch that all ranks together have trained on.
    rows: int
    #: By rank, what that rank alone holds, such as its random generators: tensors and plain values.
    ranks: list[dict[str, Any]] = field(repr=False)

    @classmethod
    def after(cls, done: int, spec: FitSpec, hvd: Collectives, own: dict[str, Any]) -> PartialEpoch:
        """The epoch after ``done`` steps, where this rank holds ``own``; a collective."""
        return cls(
            rows=done * spec.batch_size * hvd.size(),
            ranks=hvd.allgather_object(own, name="hvd_cluster.partial_epoch"),
        )

    def steps(self, spec: FitSpec, size: int) -> int:
        """Steps of the epoch that ``size`` ranks need not make again.

        The same number of ranks continues exactly where the epoch was interrupted. Another number has global batches of
        another size: it continues after its last complete one, at the start of a group of ``backward_passes_per_step``.
        Its order of rows may differ too, where the data were written for another number of workers: then some rows of
        the epoch are used twice, and as many are not used.
        """
        done = self.rows // (spec.batch_size * size)
        return done - done % spec.backward_passes_per_step

    def rank_state(self, rank: int, size: int) -> dict[str, Any] | None:
        """What ``rank`` held; None if the number of ranks was not ``size``."""
        return self.ranks[rank] if len(self.ranks) == size else None


@dataclass(frozen=True)
class Checkpoint:
    """A run's state; in the store, a file that ``torch.load`` reads.

    Use ``torch.load(path, weights_only=True)``: the keys of ``state`` are at the top level.
    """

    #: What the framework restores: tensors, numbers and texts by name.
    state: Mapping[str, Any] = field(repr=False)
    history: list[dict[str, Any]]
    #: The number of workers.
    size: int
    trained_on: Fingerprint
    #: The ``epochs`` of the fit, if a callback ended it early; else None.
    stopped_of: int | None = None
    #: The next epoch, if it has begun; else random generators are seeded for it.
    partial_epoch: PartialEpoch | None = None

    @property
    def epochs(self) -> int:
        """Finished epochs."""
        return len(self.history)

    def is_over(self, spec: FitSpec) -> bool:
        """Whether nothing is left to train.

        A run that a callback has ended continues with another ``epochs``.
        """
        stopping = spec.early_stopping
        return (
            self.epochs >= spec.epochs
            or self.stopped_of == spec.epochs
            or (stopping is not None and stopping.is_over(self.history))
        )

    def is_prefix_of(self, history: Sequence[dict[str, Any]]) -> bool:
        """Whether ``history`` begins with this one's epochs, not others of the same run.

        A run may have repeated epochs after a worker died. No two of them take exactly the same time.
        """
        last = self.epochs - 1
        return last < len(history) and (last < 0 or self.history[last].get("seconds") == history[last].get("seconds"))

    def to_bytes(self) -> bytes:
        partial = self.partial_epoch
        return packed(
            {
                **self.state,
                "history": json.dumps(self.history),
                "epoch": self.epochs,
                "size": self.size,
                "trained_on": json.dumps(self.trained_on.to_dict()),
                "stopped_of": self.stopped_of,
                "partial_epoch": None if partial is None else vars(partial),
            }
        )

    @classmethod
    def from_bytes(cls, blob: bytes, origin: str) -> Checkpoint:
        """Read what :meth:`to_bytes` wrote; no code in it is executed.

        Raises:
            DataError: ``origin`` holds something else.
        """
        try:
            state = unpacked(blob)
            del state["epoch"]
            partial = state.pop("partial_epoch")
            return cls(
                history=json.loads(state.pop("history")),
                size=state.pop("size"),
                trained_on=Fingerprint(**json.loads(state.pop("trained_on"))),
                stopped_of=state.pop("stopped_of"),
                partial_epoch=None if partial is None else PartialEpoch(**partial),
                state=state,
            )
        except Exception as error:  # torch.load and the unpickler raise anything for a foreign file
            raise DataError(
                f"{origin} is not a checkpoint of this run, or of another version of hvd_cluster ({error}): "
                "delete it, or choose another run_id"
            ) from error

    @classmethod
    def load(cls, files: RunFiles, required: str | None = None) -> Checkpoint | None:
        """The run's last checkpoint, or None.

        Args:
            files: of the run.
            required: a key that the framework's ``state`` has.

        Raises:
            DataError: the file is not a checkpoint, or it is the checkpoint of another framework.
        """
        blob = files.last()
        if blob is None:
            return None
        found = cls.from_bytes(blob, f"the checkpoint of run {files.run_id!r}")
        if required is not None and required not in found.state:
            raise DataError(
                f"run_id={files.run_id!r} has a checkpoint of another framework's estimator: choose another run_id"
            )
        return found

    @classmethod
    def load_best(cls, files: RunFiles, history: Sequence[dict[str, Any]]) -> Checkpoint | None:
        """That of the run's best epoch, for a fit that continues from ``history``.

        None if there is none, or if the run has left that epoch: its worker died before the run was saved.
        """
        blob = files.best()
        found = None if blob is None else cls.from_bytes(blob, f"the best checkpoint of run {files.run_id!r}")
        return found if found is not None and found.is_prefix_of(history) else None

    @classmethod
    def broadcast(cls, files: RunFiles, hvd: Collectives) -> Checkpoint | None:
        """The run's last checkpoint as rank 0 reads it, on every rank; or None."""
        blob = hvd.broadcast_object(files.last() if hvd.rank() == 0 else None, name="hvd_cluster.resume")
        return None if blob is None else cls.from_bytes(blob, f"the checkpoint of run {files.run_id!r}")

    @step_clock.span(SAVE)
    def save(self, files: RunFiles, best: bool = False) -> None:
        """Keep it as the run's last checkpoint, or as that of its best epoch.

        Raises:
            DataError: the store cannot be written; the text says what is left of the run.
        """
        try:
            files.save(self.to_bytes(), best)
        except DataError as error:
            if kept := _kept_text(files):
                raise DataError(f"{error}; {kept}") from error.__cause__
            raise


def _kept_text(files: RunFiles) -> str:
    """What a run keeps if a checkpoint cannot be written; files are never partial."""
    try:
        last = Checkpoint.load(files)
    except (OSError, DataError):  # the failure to write is the one to report
        return ""
    if last is None:
        return ""
    where = f"of epoch {last.epochs}" if last.partial_epoch is None else f"within epoch {last.epochs + 1}"
    return f"the checkpoint {where} is kept: run again with run_id={files.run_id!r}"


def packed(content: Mapping[str, Any]) -> bytes:
    """Tensors and plain values as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpacked(blob: bytes) -> dict[str, Any]:
    """What :func:`packed` took, on the CPU; no code in it is executed."""
    content: dict[str, Any] = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    return content
