"""The file of a run's best epoch: what the user's ModelCheckpoint writes, on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.lightning.checkpoint_file import plain_checkpoint
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.run.snapshot import Snapshot
from hvd_cluster.lightning.installed import submodule

_callbacks: Any = submodule("callbacks")

logger = logging.getLogger(__name__)


class BestFile:
    """Outlives the worker that wrote it: one that takes its place goes on with the best so far.

    It is kept with the run together with the epochs of which it is the best: the file alone may be of an epoch that the
    run has left, since its worker died before the run was saved.

    Args:
        spec: the run.
        folder: where this worker writes what the run keeps.
    """

    def __init__(self, spec: LightningSpec, folder: str) -> None:
        self._folder = folder
        self._files = RunFiles.of(spec)
        self._placed: list[Any] = []
        self._kept: tuple[str, int] | None = None

    def place(self, callbacks: Sequence[Any]) -> None:
        """Have each ModelCheckpoint write to the run's folder, unless the user has named another."""
        for callback in callbacks:
            if isinstance(callback, _callbacks.ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = self._folder
                self._placed.append(callback)

    def keep(self, trainer: Any, history: list[dict[str, Any]], size: int, trained_on: Fingerprint) -> None:
        """Keep the file with the run where it is another one; on rank 0, before the run is saved with this history."""
        callback = _decisive(trainer)
        if callback not in self._placed:
            return
        path = Path(callback.best_model_path)
        if not path.exists():
            return
        now = (str(path), path.stat().st_mtime_ns)
        if now != self._kept:
            self._files.save(Snapshot(path.read_bytes(), history, size, trained_on).to_bytes(), best=True)
            self._kept = now

    def bring_back(self, trainer: Any, checkpoint: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """Put the file where this start's callbacks look, and their paths in ``checkpoint``, which is about to be
        loaded, likewise: Lightning forgets the best of another folder. Every rank takes part.

        Without a file of the course that has come to ``history``, the search begins anew.
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
        best = Snapshot.best_of(self._files, history) if trainer.is_global_zero else None
        if best is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(best.body)
        if not trainer.strategy.broadcast(best is not None, src=0):
            del checkpoint["callbacks"][callback.state_key]

    @staticmethod
    def load(trainer: Any, module: Any) -> None:
        """Give ``module`` the weights that the user's ModelCheckpoint found best, if there is one that monitors.

        Raises:
            DataError: the file holds something else; none of it is executed.
        """
        callback = _decisive(trainer)
        if callback is None:
            return
        path = callback.best_model_path
        if not Path(path).exists():
            logger.warning("the best checkpoint %s is gone: the last weights are returned", path)
            return
        weights = plain_checkpoint(path).get("state_dict")
        if not isinstance(weights, dict):
            raise DataError(f"the best checkpoint {path} has no weights: its state_dict is a {type(weights).__name__}")
        module.load_state_dict(weights)


def _monitors(callback: Any) -> bool:
    return getattr(callback, "monitor", None) is not None


def _decisive(trainer: Any) -> Any:
    """The first ModelCheckpoint that monitors and has found a best epoch, or None."""
    found = (one for one in trainer.checkpoint_callbacks if _monitors(one) and getattr(one, "best_model_path", None))
    return next(found, None)


def _move(state: dict[str, Any], old: str, new: str) -> None:
    """Let a ModelCheckpoint's state name files in another folder."""

    def moved(path: str) -> str:
        return new + path[len(old) :] if path.startswith(old) else path

    state["dirpath"] = new
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        state[name] = moved(state.get(name, ""))
    state["best_k_models"] = {moved(path): score for path, score in state.get("best_k_models", {}).items()}
