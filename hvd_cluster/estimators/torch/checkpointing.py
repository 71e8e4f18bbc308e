"""When a PyTorch run is saved, and how it goes on: each epoch, within epochs, and the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hvd_cluster.estimators.run import early_stopping
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.snapshot import is_of_course
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.spec import TrainSpec
from hvd_cluster.estimators.torch import random_state
from hvd_cluster.estimators.torch.checkpoint import Checkpoint, Running
from hvd_cluster.estimators.torch.means import Means
from hvd_cluster.estimators.torch.steps import Steps


@dataclass
class Checkpointing:
    """Saves what rank 0 holds, together with what every rank needs to go on with bit for bit."""

    spec: TrainSpec
    hvd: Collectives
    steps: Steps
    #: By what the learning rates of one worker are multiplied.
    scale: float
    trained_on: Fingerprint

    def __post_init__(self) -> None:
        self._files = RunFiles.of(self.spec)
        #: The best epoch's checkpoint on rank 0, where it will be returned.
        self._best: bytes | None = None
        #: The epoch from which on the best one is searched for: that of the best checkpoint of a resumed run.
        self._since = 0
        self._given_rates: list[float] | None = self.spec.optimizer.given_rates

    def save_within(self, history: list[dict[str, Any]], done: int, means: Means) -> None:
        """Save amid an epoch, of which ``done`` steps have been made; every rank takes part."""
        share_buffers(self.steps.model)
        mine = (means.sums, random_state.capture())
        gathered = self.hvd.allgather_object(mine, name="hvd_cluster.running")
        if self.hvd.rank() != 0:
            return
        running = Running(
            rows=done * self.spec.batch_size * self.hvd.size(),
            sums=torch.stack([sums for sums, _ in gathered]),
            random=[random for _, random in gathered],
        )
        self._taken(history, running).save(self._files)

    def save_epoch(self, history: list[dict[str, Any]], is_last: bool) -> None:
        """Save after an epoch, on rank 0, as often as the spec says; always after the last one, and the best."""
        if self.hvd.rank() != 0 or not (self._files.are_kept or self.spec.return_best):
            return
        every = self.spec.checkpoint_every_epochs
        is_best = self._is_best(history[self._since :])
        if not is_last and not is_best and len(history) % every:
            return
        checkpoint = self._taken(history)
        if is_last or len(history) % every == 0:
            checkpoint.save(self._files)
        if is_best and (self.spec.validation_is_there or self.spec.return_best):
            checkpoint.save(self._files, best=True)
            if self.spec.return_best:
                self._best = checkpoint.to_bytes()

    def load(self) -> Checkpoint | None:
        """What the run has come to so far, the same on every rank.

        Raises:
            DataError: it is none of this run, or of other data.
        """
        found = Checkpoint.load(self._files) if self.hvd.rank() == 0 else None
        blob = found.to_bytes() if found is not None else b""
        blob = self.hvd.broadcast_object(blob, root_rank=0, name="hvd_cluster.resume")
        if not blob:
            return None
        checkpoint = Checkpoint.from_bytes(blob, f"the checkpoint of run {self.spec.run_id!r}")
        checkpoint.require_data(self.spec.run_id, self.trained_on)
        self._given_rates = checkpoint.given_rates
        if checkpoint.size == self.hvd.size() and checkpoint.scale is not None:
            self.scale = checkpoint.scale  # it goes on with exactly its rates, whatever scale_lr is now
        if self.hvd.rank() == 0 and (self.spec.validation_is_there or self.spec.return_best):
            self._find_best(checkpoint)
        return checkpoint

    def _find_best(self, last: Checkpoint) -> None:
        """Take up the best checkpoint of the run that goes on from ``last``.

        A run that ended may have saved it after ``last``: an epoch of a course that is left now, and of which no
        number is in the history. Then ``last`` is the best there is. Or it has ended after it saved ``last``, and
        before it saved the same as the best.
        """
        blob = self._files.best()
        best = None if blob is None else Checkpoint.from_bytes(blob, "the best checkpoint")
        if best is not None and not is_of_course(best.history, last.history):
            best = None
        since = 0 if best is None else best.epochs - 1
        if last.running is None and (best is None or self._is_best(last.history[since:])):
            best = last
            best.save(self._files, best=True)
        self._since = last.epochs if best is None else best.epochs - 1
        if best is not None and self.spec.return_best:
            self._best = best.to_bytes()

    def to_return(self, history: list[dict[str, Any]]) -> Checkpoint:
        """What the fit returns, on rank 0: the state now, or that of the best epoch."""
        blob = self._best if self.spec.return_best else None
        return self._taken(history) if blob is None else Checkpoint.from_bytes(blob, "the best checkpoint")

    def _is_best(self, records: list[dict[str, Any]]) -> bool:
        """Whether the last one is the best of them."""
        judge = self.spec.early_stopping or early_stopping.DEFAULT
        return judge.best_epoch(records) == len(records) - 1

    def _taken(self, history: list[dict[str, Any]], running: Running | None = None) -> Checkpoint:
        return Checkpoint.of(
            self.steps.model,
            self.steps.optimizer,
            self.hvd.size(),
            self.scale,
            history,
            self.trained_on,
            scheduler=self.steps.scheduler,
            scaler=self.steps.scaler,
            running=running,
            given_rates=self._given_rates,
        )


def share_buffers(model: torch.nn.Module) -> None:
    """Give all ranks the buffers of rank 0, such as running means.

    The model that is saved and returned is rank 0's: so that one is validated, and a resumed run starts as this one
    goes on.
    """
    from hvd_cluster.torch import functions

    functions.share_buffers(model, root_rank=0)
