"""The strategies of ``sharding=``: ranks hold parts of the module, or of the state of its optimizers.

Lightning's ``ModelParallelStrategy`` does not serve: it needs a module whose ``configure_model()`` divides it, and it
reads optimizers from a checkpoint by itself, so that their rates cannot be scaled to another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hvd_cluster.torch as hvd
from hvd_cluster.estimators.torch.model_pickling import with_versions
from hvd_cluster.estimators.torch.strategies.checks import called_modules, require_divisible
from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2
from hvd_cluster.estimators.torch.strategies.fully_sharded import reshard, shard, sharded_state, whole
from hvd_cluster.estimators.torch.strategies.zero1 import zero_optimizer
from hvd_cluster.lightning import HorovodStrategy
from hvd_cluster.lightning.optimizers import move_schedulers, share_state

_HorovodStrategy: Any = HorovodStrategy


class Zero1Strategy(_HorovodStrategy):
    """HorovodStrategy whose optimizers are divided. Lightning collects their state on rank 0 for a checkpoint."""

    _configured: list[Any]

    def _distribute(self) -> None:
        share_state(self._configured)
        divided = [zero_optimizer(optimizer) for optimizer in self._configured]
        for before, after in zip(self._configured, divided, strict=True):
            move_schedulers(self._schedulers(), before, after)
        self._replace(divided)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part, of which ZeRO keeps a copy."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def teardown(self) -> None:
        """Keep the optimizers, which have the state."""
        self._configured = []
        super().teardown()


class FSDP2Strategy(_HorovodStrategy):
    """HorovodStrategy of a module whose layers are divided; rank 0 collects them for a checkpoint.

    Args:
        config: what is wrapped.
        options: those of HorovodStrategy.
    """

    def __init__(self, config: FSDP2, **options: Any) -> None:
        super().__init__(**options)
        self._config = config

    def setup(self, trainer: Any) -> None:
        """Divide the module before its optimizers are made."""
        module = self.lightning_module
        hvd.broadcast_parameters(dict(module.state_dict()), root_rank=0)
        shard(module, self._config, self.root_device, None, called_modules(module))
        super().setup(trainer)

    def _initial_state(self) -> dict[str, Any]:
        return {}  # equal before the module is divided

    def _distribute(self) -> None:
        for optimizer in self._configured:
            require_divisible(self._config, optimizer)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Leave this rank's part only of the parameters: below torch 2.8, layers keep what they have gathered."""
        result = super().validation_step(*args, **kwargs)
        reshard(self.lightning_module)
        return result

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The complete state, on rank 0."""
        state = self.lightning_module.state_dict()
        return with_versions(whole(state, self.is_global_zero), state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Its complete state, on rank 0."""
        return whole(super().optimizer_state(optimizer), self.is_global_zero)  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of complete states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.load_state_dict({**state, "state": sharded_state(state["state"], held)})
