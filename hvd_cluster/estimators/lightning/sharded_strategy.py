"""The strategies of ``sharding=``.

Ranks hold parts of the module, or of the state of its optimizers. Lightning's ``ModelParallelStrategy`` does not serve:
it needs a module whose ``configure_model()`` divides it, and it reads optimizers from a checkpoint by itself, so that
their rates cannot be scaled to another number of ranks.
"""

from __future__ import annotations

from typing import Any

import hvd_cluster.torch as hvd
from hvd_cluster.estimators.lightning.shard_strategy import ShardStrategy
from hvd_cluster.estimators.torch.initial_model import initial_model
from hvd_cluster.estimators.torch.model_pickling import with_versions
from hvd_cluster.estimators.torch.strategies.checks import called_modules, require_divisible
from hvd_cluster.estimators.torch.strategies.fully_sharded import fill, reshard, shard, whole
from hvd_cluster.estimators.torch.strategies.zero1 import zero_optimizer
from hvd_cluster.lightning.optimizers import move_schedulers, share_state


class Zero1Strategy(ShardStrategy):
    """The strategy that divides the optimizers.

    Lightning collects their state on rank 0 for a checkpoint of ModelCheckpoint.
    """

    def _distribute(self) -> None:
        share_state(self._configured)
        divided = [zero_optimizer(optimizer) for optimizer in self._configured]
        for before, after in zip(self._configured, divided, strict=True):
            move_schedulers(self._schedulers(), before, after)
        self._replace(divided)


class FSDP2Strategy(ShardStrategy):
    """The strategy that divides the layers.

    Rank 0 collects them for a checkpoint of ModelCheckpoint.
    """

    # A rank that holds parts of frozen parameters cannot know if these have changed.
    saves_all = True

    def setup(self, trainer: Any) -> None:
        """Divide the module before its optimizers are made."""
        spec, module = self._run.spec, self.lightning_module
        net = module if spec.objective is None else module.net
        is_empty = any(parameter.is_meta for parameter in net.parameters())
        complete = initial_model(spec.model, self._run.hvd, net) if is_empty else None
        if complete is None:
            hvd.broadcast_parameters(dict(module.state_dict()), root_rank=0)
        shard(module, spec.sharding, self.root_device, None, called_modules(module))
        if complete is not None:
            fill(net, complete, self._run.hvd, self.root_device)
        del complete
        super().setup(trainer)

    def _initial_state(self) -> dict[str, Any]:
        return {}  # equal before the module is divided

    def _distribute(self) -> None:
        for optimizer in self._configured:
            require_divisible(self._run.spec.sharding, optimizer)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Leave only this rank's part of the parameters after a step.

        Below torch 2.8, layers keep what they have gathered.
        """
        result = super().validation_step(*args, **kwargs)
        reshard(self.lightning_module)
        return result

    def _whole_state(self) -> dict[str, Any]:
        state = self.saved_state()
        return with_versions(whole(state, self.is_global_zero), state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The complete state of an optimizer on rank 0, or what is not in shards."""
        return whole(super().optimizer_state(optimizer), self.is_global_zero)  # type: ignore[no-any-return]
