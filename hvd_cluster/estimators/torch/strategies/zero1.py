"""``sharding="zero1"``: each rank has the optimizer state of some parameters, and sends their values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.strategies.strategy import Replicated


class Zero1(Replicated):
    """As :class:`Replicated`, with the optimizer's state divided among the workers."""

    def _distributed(self, base: torch.optim.Optimizer, model: torch.nn.Module, hvd: Collectives) -> Any:
        return super()._distributed(zero_optimizer(base), model, hvd)


def zero_optimizer(base: torch.optim.Optimizer) -> Any:
    """A ZeroRedundancyOptimizer of the parameters, options and state of ``base``; every rank takes part."""
    accepted = inspect.signature(type(base)).parameters
    groups = [{**group, "params": list(group["params"])} for group in base.param_groups]
    defaults = {name: value for name, value in base.defaults.items() if name in accepted}
    optimizer = ZeroRedundancyOptimizer(groups, type(base), **defaults)
    if base.state:
        optimizer.load_state_dict(base.state_dict())
        optimizer.state.clear()  # it has copied its part
    return optimizer
