"""The strategy of a fit whose ranks hold and save different tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hvd_cluster.estimators.lightning.estimator_strategy import EstimatorStrategy
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.torch.strategies.parts import name_in_shards
from hvd_cluster.estimators.torch.strategies.shard_folders import ShardFolders


class ShardStrategy(EstimatorStrategy):
    """Base of the strategies of ``sharding=`` and ``communication=``.

    Its optimizers keep their state after the fit.
    """

    reads_alone = False
    _configured: list[Any]

    def __init__(self, run: WorkerRun[LightningSpec], **options: Any) -> None:
        super().__init__(run, **options)
        self.folders = ShardFolders(run)
        self.folders.keep(None if self._shards is None else self._shards.name)
        #: What shards that are saved now leave to Lightning's checkpoint: of the module, and of each optimizer.
        self._rests: tuple[dict[str, Any], dict[int, dict[str, Any]]] | None = None

    def setup_optimizers(self, trainer: Any) -> None:
        """Give each optimizer a name in shards."""
        super().setup_optimizers(trainer)
        for number, optimizer in enumerate(self.optimizers):
            name_in_shards(optimizer, number)

    @contextlib.contextmanager
    def in_shards(self) -> Iterator[str]:
        """Write all tensors to a folder, and return its name.

        Inside the block, Lightning's checkpoints leave the tensors out. Every rank takes part.
        """
        name, others, rests = self.folders.write(self.saved_state(), *self.optimizers)
        self._rests = others, dict(zip(map(id, self.optimizers), rests, strict=True))
        try:
            yield name
        finally:
            self._rests = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The complete state on rank 0, or what is not in shards."""
        return self._whole_state() if self._rests is None else self._rests[0]

    def _whole_state(self) -> dict[str, Any]:
        return self.saved_state()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The complete state of an optimizer on rank 0, or what is not in shards."""
        if self._rests is None:
            return super().optimizer_state(optimizer)  # type: ignore[no-any-return]
        return self._rests[1][id(optimizer)]

    def teardown(self) -> None:
        """Keep the optimizers, which have the state."""
        self._configured = []
        super().teardown()
