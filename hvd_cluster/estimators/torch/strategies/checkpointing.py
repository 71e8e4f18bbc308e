"""Saves and restores a run whose ranks hold different parts of the model or the optimizer."""

from __future__ import annotations

import secrets
from typing import Any

from hvd_cluster.estimators.run.checkpoint import Checkpoint, PartialEpoch
from hvd_cluster.estimators.torch.checkpoint import Checkpointing, result_of
from hvd_cluster.estimators.torch.strategies import parts
from hvd_cluster.estimators.torch.strategies.shards import Shards, shards_path


class ShardedCheckpointing(Checkpointing):
    """Every rank writes its tensors to a new folder in the store; then rank 0 saves a checkpoint that names the folder.

    Folders that neither the last nor the best checkpoint names are deleted. The driver reads the fitted model from the
    last folder, so that no worker ever holds all of it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._takes_part = True
        #: What the fit returns if this is its end.
        self._last = b""
        #: The folders of the last and of the best checkpoint.
        self._folders: dict[bool, str | None] = {}

    def restore(self) -> None:
        super().restore()
        if (found := self._run.resumed) is not None:
            self._last = result_of(found)
            self._folders[False] = found.state.get("shards")

    def to_return(self) -> bytes:
        return self._best or self._last

    def _find_best(self, last: Checkpoint) -> Checkpoint | None:
        best = super()._find_best(last) if self._run.hvd.rank() == 0 else None
        self._folders[True] = None if best is None else best.state.get("shards")
        self._since, self._best = self._run.hvd.broadcast_object((self._since, self._best), name="hvd_cluster.best")
        return best

    def _current(self, partial_epoch: PartialEpoch | None = None) -> Checkpoint:
        run, steps = self._run, self._steps
        name = run.hvd.broadcast_object(f"{run.epoch}-{secrets.token_hex(4)}", name="hvd_cluster.shards")
        model = steps.model_state()
        others, optimizer = parts.rest_of(model, steps.optimizer)
        for entries in run.hvd.allgather_object(optimizer["state"], name="hvd_cluster.shards.rest"):
            optimizer["state"] |= entries
        Shards(run.spec.store, run.spec.run_id, name).write(parts.tensors_of(model, steps.optimizer))
        state = steps.capture(self._scale, self._given_rates, (others, optimizer))
        return run.checkpoint({**state, "shards": name}, partial_epoch)

    def _keep(self, checkpoint: Checkpoint, best: bool = False) -> None:
        if not best:
            self._last = result_of(checkpoint)
        if self._run.hvd.rank() == 0:
            super()._keep(checkpoint, best)
            self._folders[best] = checkpoint.state["shards"]
            self._delete_others()

    def _delete_others(self) -> None:
        store, run_id = self._run.spec.store, self._run.spec.run_id
        for path in store.list(shards_path(store, run_id)):
            if (name := path.rsplit("/", 1)[-1]) not in self._folders.values():
                store.delete(f"{shards_path(store, run_id)}/{name}")
