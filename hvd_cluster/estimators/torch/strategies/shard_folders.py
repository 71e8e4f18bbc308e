"""The folders with the shards of a run's checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.torch.strategies import parts
from hvd_cluster.estimators.torch.strategies.shards import Shards, shards_path


class ShardFolders:
    """Those that neither the last nor the best checkpoint names are deleted.

    Args:
        run: on this worker.
    """

    def __init__(self, run: WorkerRun[Any]) -> None:
        self._run = run
        #: The folders of the last and of the best checkpoint.
        self._kept: dict[bool, str | None] = {}

    def write(self, model: Mapping[str, Any], *optimizers: Any) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
        """Write this rank's tensors to a new folder; every rank takes part.

        Args:
            model: the state to keep.
            optimizers: whose states to keep.

        Returns:
            The name of the folder, and what is not in it: of the model, and of each optimizer.
        """
        run = self._run
        name = run.hvd.broadcast_object(f"{run.epoch}-{secrets.token_hex(4)}", name="hvd_cluster.shards")
        rests = [parts.rest_of(optimizer) for optimizer in optimizers]
        own = [rest["state"] for rest in rests]
        for states in run.hvd.allgather_object(own, name="hvd_cluster.shards.rest"):
            for rest, entries in zip(rests, states, strict=True):
                rest["state"] |= entries
        Shards(run.spec.store, run.spec.run_id, name).write(parts.tensors_of(model, *optimizers))
        return name, parts.others_of(model), rests

    def keep(self, name: str | None, best: bool = False) -> None:
        """Note which folder the last or the best checkpoint names."""
        self._kept[best] = name

    def delete_others(self) -> None:
        """Delete the folders that no checkpoint names; to be called on rank 0."""
        store, run_id = self._run.spec.store, self._run.spec.run_id
        for path in store.list(shards_path(store, run_id)):
            if (name := path.rsplit("/", 1)[-1]) not in self._kept.values():
                store.delete(f"{shards_path(store, run_id)}/{name}")
