"""The file that the user's ModelCheckpoint writes for the best epoch, on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.lightning.checkpoint_file import plain_checkpoint
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.best_file import BestFile
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.lightning.installed import submodule

_callbacks: Any = submodule("callbacks")

logger = logging.getLogger(__name__)


class LightningBestFile(BestFile):
    """The file, and where ModelCheckpoints write.

    Args:
        run: on this worker.
        folder: where this worker writes what the run keeps.
    """

    def __init__(self, run: WorkerRun[LightningSpec], folder: str) -> None:
        super().__init__(run)
        self._folder = folder
        self._placed: list[Any] = []

    def place(self, callbacks: Sequence[Any]) -> None:
        """Let ModelCheckpoints write to the run's folder unless the user named another."""
        for callback in callbacks:
            if isinstance(callback, _callbacks.ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = self._folder
                self._placed.append(callback)

    def save_decisive(self, trainer: Any) -> None:
        """:meth:`save` the file of the ModelCheckpoint that decides."""
        callback = _decisive(trainer)
        if callback in self._placed:
            self.save(Path(callback.best_model_path))

    def restore_callbacks(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the file, and put this worker's folder into ``checkpoint``.

        ``checkpoint`` is about to be loaded. Lightning forgets the best of another folder. Without a file, the search
        for the best starts again. Every rank takes part.
        """
        for callback in self._placed:
            state = checkpoint["callbacks"].get(callback.state_key)
            if state is not None:
                _move(state, state["dirpath"], callback.dirpath)
        paths = {
            callback: checkpoint["callbacks"].get(callback.state_key, {}).get("best_model_path")
            for callback in trainer.checkpoint_callbacks
            if _monitors(callback)
        }
        callback, path = next(((one, path) for one, path in paths.items() if path), (None, ""))
        if callback is None or callback not in self._placed:
            return
        is_restored = trainer.is_global_zero and self.restore(Path(path)) is not None
        if not trainer.strategy.broadcast(is_restored, src=0):
            del checkpoint["callbacks"][callback.state_key]

    @torch.no_grad()
    def load_on_all_ranks(self, trainer: Any) -> None:
        """:meth:`load` into the trainer's module on every rank.

        A rank may hold only a part of the module. Every rank takes part.
        """
        from hvd_cluster.estimators.torch.strategies.parts import others_of, state_part

        hvd, module = self.run.hvd, trainer.lightning_module
        weights = self.weights(trainer) if trainer.is_global_zero else None
        given = None if weights is None else (set(weights), others_of(weights))
        found = hvd.broadcast_object(given, name="hvd_cluster.best")
        if found is None:
            return
        names, others = found
        for name, own in module.state_dict().items():  # one at a time, so that no other rank holds all of them
            if name in names - set(others):
                complete = torch.empty(own.shape, dtype=own.dtype) if weights is None else weights[name]
                own.copy_(state_part(hvd.broadcast(complete, root_rank=0, name="hvd_cluster.best_weights"), own))
        module.load_state_dict(others, strict=False)

    def load(self, trainer: Any, module: Any) -> None:
        """Load :meth:`weights` into ``module``, if there are any."""
        weights = self.weights(trainer)
        if weights is None:
            return
        own, is_part = module.state_dict(), isinstance(self.run.spec.model, ModelSource)
        others = [name for name, one in weights.items() if np.shape(one) != np.shape(own.get(name))]
        if others or not (is_part or own.keys() == weights.keys()):  # training has changed the structure since
            named = ", ".join(map(repr, others or own.keys() ^ weights.keys()))
            logger.warning("the best checkpoint has other weights than the module: the last are returned (%s)", named)
        elif is_part:
            made_state.load(module, weights)
        else:
            module.load_state_dict(weights)

    def weights(self, trainer: Any) -> dict[str, Any] | None:
        """The weights that ModelCheckpoint found best; None if none monitors a metric.

        Raises:
            DataError: the file holds something else; no code in it is executed.
        """
        callback = _decisive(trainer)
        if callback is None:
            return None
        path = callback.best_model_path
        if not Path(path).exists():
            logger.warning("the best checkpoint %s no longer exists: the last weights are returned", path)
            return None
        weights = plain_checkpoint(path).get("state_dict")
        if not isinstance(weights, dict):
            raise DataError(f"the best checkpoint {path} has no weights: its state_dict is a {type(weights).__name__}")
        return weights


def _monitors(callback: Any) -> bool:
    return getattr(callback, "monitor", None) is not None


def _decisive(trainer: Any) -> Any:
    """The first ModelCheckpoint that monitors and has found a best epoch, or None."""
    found = (one for one in trainer.checkpoint_callbacks if _monitors(one) and getattr(one, "best_model_path", None))
    return next(found, None)


def _move(state: dict[str, Any], old: str, new: str) -> None:
    """Change the folder of the files in a ModelCheckpoint's state."""

    def moved(path: str) -> str:
        return new + path[len(old) :] if path.startswith(old) else path

    state["dirpath"] = new
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        state[name] = moved(state.get(name, ""))
    state["best_k_models"] = {moved(path): score for path, score in state.get("best_k_models", {}).items()}
