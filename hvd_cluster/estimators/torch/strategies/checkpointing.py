"""Saves and restores a run whose ranks hold parts of the model or optimizer."""

from __future__ import annotations

from typing import Any

from hvd_cluster.estimators.run.checkpoint import Checkpoint, PartialEpoch
from hvd_cluster.estimators.torch.checkpoint import Checkpointing, result_of
from hvd_cluster.estimators.torch.strategies.shard_folders import ShardFolders


class ShardedCheckpointing(Checkpointing):
    """Checkpoints of ranks that write their own tensors.

    Every rank writes its tensors to a new folder in the store; then rank 0 saves a checkpoint that names the folder.
    The driver reads the fitted model from the last folder, so that no worker ever holds all of it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._takes_part = True
        #: What the fit returns if this is its end.
        self._last = b""
        self._folders = ShardFolders(self._run)

    def restore(self) -> None:
        super().restore()
        if (found := self._run.resumed) is not None:
            self._last = result_of(found)
            self._folders.keep(found.state.get("shards"))

    def to_return(self) -> bytes:
        return self._best or self._last

    def _find_best(self, last: Checkpoint) -> Checkpoint | None:
        best = super()._find_best(last) if self._run.hvd.rank() == 0 else None
        self._folders.keep(None if best is None else best.state.get("shards"), best=True)
        self._since, self._best = self._run.hvd.broadcast_object((self._since, self._best), name="hvd_cluster.best")
        return best

    def _current(self, partial_epoch: PartialEpoch | None = None) -> Checkpoint:
        steps = self._steps
        name, others, [optimizer] = self._folders.write(steps.model_state(), steps.optimizer)
        state = steps.capture(self._scale, self._given_rates, (others, optimizer))
        return self._run.checkpoint({**state, "shards": name}, partial_epoch)

    def _keep(self, checkpoint: Checkpoint, best: bool = False) -> None:
        if not best:
            self._last = result_of(checkpoint)
        if self._run.hvd.rank() == 0:
            super()._keep(checkpoint, best)
            self._folders.keep(checkpoint.state["shards"], best)
            self._folders.delete_others()
