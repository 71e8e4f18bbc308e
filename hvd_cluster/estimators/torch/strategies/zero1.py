"""``sharding="zero1"``: each rank has the optimizer state of some parameters.

It sends the values of these parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.optimizer_state import accepted, own_attributes
from hvd_cluster.estimators.torch.strategies.strategy import Replicated


class Zero1(Replicated):
    """As :class:`Replicated`, with the optimizer's state divided among the workers."""

    def _distributed(self, base: torch.optim.Optimizer, model: torch.nn.Module, hvd: Collectives) -> Any:
        return super()._distributed(zero_optimizer(base), model, hvd)


def zero_optimizer(base: torch.optim.Optimizer) -> Any:
    """A ZeroRedundancyOptimizer of the parameters, options and state of ``base``.

    Every rank takes part.
    """
    groups = [{**group, "params": list(group["params"])} for group in base.param_groups]
    own = own_attributes(base)
    optimizer = ZeroRedundancyOptimizer(groups, type(base), **accepted(type(base), {**own, **base.defaults}))
    vars(optimizer.optim).update(own)  # options that the class keeps outside of defaults
    if base.state:
        optimizer.load_state_dict(base.state_dict())
        optimizer.state.clear()  # it has copied its part
    return optimizer
