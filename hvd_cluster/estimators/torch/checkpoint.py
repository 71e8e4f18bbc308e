"""Saves and restores a PyTorch run: after and within epochs, and the best epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run import early_stopping, random_state
from hvd_cluster.estimators.run.checkpoint import Checkpoint, PartialEpoch, packed
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.spec import TrainSpec
from hvd_cluster.estimators.torch.changed_module import Structure
from hvd_cluster.estimators.torch.means import Means
from hvd_cluster.estimators.torch.steps import Steps
from hvd_cluster.estimators.torch.train_state import unscaled_optimizer
from hvd_cluster.monitor.step_clock import SAVE, step_clock

if TYPE_CHECKING:
    from hvd_cluster.data.store import Store
    from hvd_cluster.estimators.torch.strategies.shards import Shards

logger = logging.getLogger(__name__)


class Checkpointing:
    """Saves the model and optimizer of rank 0, and what all ranks need to continue.

    A continued run has the same bits.

    Args:
        run: on this worker.
        steps: the model and the optimizer.
        scale: by what the learning rates of one worker are multiplied.
    """

    def __init__(self, run: WorkerRun[TrainSpec], steps: Steps, scale: float) -> None:
        self._run = run
        self._steps = steps
        self._scale = scale
        self._given_rates = run.spec.optimizer.given_rates
        #: Whether this rank holds something that is saved.
        self._takes_part = run.hvd.rank() == 0
        #: What :meth:`to_return` returns of the best epoch, on rank 0 with ``return_best``.
        self._best: bytes | None = None
        #: Index of the first epoch that may be the best: that of the best checkpoint of a resumed run.
        self._since = 0
        self._structure = Structure(steps.model, run.spec)

    def check_structure(self) -> None:
        """Check that the fit can return the model.

        Training may have changed its structure.

        Raises:
            DataError: it cannot.
        """
        self._structure.require_returnable(self._steps.model, [self._steps.optimizer])

    def restore(self) -> None:
        """Continue from the run's checkpoint, if it has one.

        Raises:
            DataError: it is of another model or optimizer.
        """
        run, steps, found = self._run, self._steps, self._run.resumed
        if found is None:
            return
        self._given_rates = found.state["given_rates"]
        if found.size == run.hvd.size():
            self._scale = found.state["scale"]  # the run keeps its exact rates, whatever scale_lr is now
        if self._takes_part and self._looks_for_best:
            self._find_best(found)
        steps.restore(
            found,
            run.spec.run_id,
            run.hvd.size(),
            self._scale,
            shards_of(run.spec.store, run.spec.run_id, found.state),
            not run.spec.saves_shards,
        )

    @step_clock.span(SAVE)
    def save_within(self, done: int, means: Means) -> None:
        """Save after ``done`` steps of an epoch; every rank takes part."""
        self._steps.share_model()
        own = {"sums": means.sums, "metrics": means.names, "random": random_state.capture()}
        partial_epoch = self._run.partial(done, own)
        if self._takes_part:
            self._keep(self._current(partial_epoch))

    @step_clock.span(SAVE)
    def save_epoch(self, is_last: bool) -> None:
        """Save what is due after an epoch: the last checkpoint, the best one.

        Every rank takes part.
        """
        run = self._run
        if not self._takes_part:
            return
        is_due = run.is_checkpoint_due(is_last)
        is_best = self._looks_for_best and self._is_best(run.history[self._since :])
        if not is_due and not is_best:
            return
        checkpoint = self._current()
        if is_due:
            self._keep(checkpoint)
        if is_best:
            self._keep(checkpoint, best=True)
            if run.spec.return_best:
                self._best = self._result_of(checkpoint)

    def to_return(self) -> bytes:
        """The model and the optimizer that the fit returns, on rank 0.

        They are the current ones, or those of the best epoch.
        """
        return self._best or self._result_of(self._current())

    @property
    def _looks_for_best(self) -> bool:
        spec = self._run.spec
        return spec.return_best or (spec.has_validation and self._run.files.are_kept)

    def _find_best(self, last: Checkpoint) -> Checkpoint | None:
        """Load and return the best checkpoint of the run that continues from ``last``.

        It may be of an epoch after ``last``, which the run has left: then ``last`` is the best one known. So it is if
        the run ended after it saved ``last`` and before it saved the same as the best.
        """
        best = Checkpoint.load_best(self._run.files, last.history)
        since = 0 if best is None else best.epochs - 1
        if best is None and self._run.spec.return_best and not self._is_best(last.history):
            logger.warning(
                "return_best: an earlier epoch of the run was better, but its weights were not kept; the best one from "
                "epoch %d on is returned",
                last.epochs,
            )
        if last.partial_epoch is None and (best is None or self._is_best(last.history[since:])):
            best = last
            best.save(self._run.files, best=True)
        self._since = last.epochs if best is None else best.epochs - 1
        if best is not None and self._run.spec.return_best:
            self._best = result_of(best)
        return best

    def _is_best(self, records: list[dict[str, Any]]) -> bool:
        """Whether the last one is the best of them."""
        stopping = self._run.spec.early_stopping or early_stopping.DEFAULT
        return stopping.best_epoch(records) == len(records) - 1

    def _keep(self, checkpoint: Checkpoint, best: bool = False) -> None:
        checkpoint.save(self._run.files, best)

    def _result_of(self, checkpoint: Checkpoint) -> bytes:
        return result_of(checkpoint, **self._structure.changed(self._steps.model, self._steps.optimizer))

    def _current(self, partial_epoch: PartialEpoch | None = None) -> Checkpoint:
        return self._run.checkpoint(self._steps.capture(self._scale, self._given_rates), partial_epoch)


def result_of(checkpoint: Checkpoint, **changed: Any) -> bytes:
    """A copy of the model and the optimizer, or of what is not in shards.

    Args:
        changed: :meth:`Structure.changed`.
    """
    state = checkpoint.state
    shards = {"shards": state["shards"]} if "shards" in state else {}
    return packed({"model": state["model"], "optimizer": unscaled_optimizer(state), **shards, **changed})


def require_shards(found: Checkpoint | None, run_id: str) -> None:
    """Check that ranks with different tensors can continue from a checkpoint.

    Raises:
        DataError: it is one of another fit.
    """
    if found is not None and "shards" not in found.state:
        raise DataError(
            f"run_id={run_id!r} has a checkpoint of a fit without sharding and with communication in every step, in "
            "one file: continue it so, or choose another run_id"
        )


def shards_of(store: Store, run_id: str, state: Mapping[str, Any]) -> Shards | None:
    """Where the tensors of the ``state`` of a checkpoint are; None if it has them."""
    if "shards" not in state:
        return None
    from hvd_cluster.estimators.torch.strategies.shards import Shards

    return Shards(store, run_id, state["shards"])
