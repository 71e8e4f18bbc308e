"""An optimizer of MXNet's Module API that averages gradients over all ranks."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from hvd_cluster.engine.membership import takes_part
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.mxnet.ops import grouped_allreduce_


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc,unused-ignore]
    """An optimizer that averages gradients over all ranks before it applies them.

    Args:
        optimizer: an MXNet optimizer; its attributes are attributes of this object too.
        gradient_predivide_factor: divides an average by this before the sum and by the rest after it.
        num_groups: accepted and ignored: gradients that arrive together are reduced together.
        process_set: the ranks that take part; other ranks apply their own gradients.

    Raises:
        ValueError: ``gradient_predivide_factor`` is 0.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        # Does not call the base class's __init__: the wrapped optimizer has the attributes that it sets.
        del num_groups
        if gradient_predivide_factor == 0.0:
            raise ValueError("gradient_predivide_factor=0 must be another number: gradients are divided by it")
        self.wrapped_optimizer = optimizer
        self._predivide_factor = gradient_predivide_factor
        self._process_set = process_set

    def __getattr__(self, item: str) -> Any:
        if item == "wrapped_optimizer":
            raise AttributeError(item)  # during unpickling
        return getattr(self.wrapped_optimizer, item)

    def create_state(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self.wrapped_optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self.wrapped_optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce the gradients, and update with the wrapped optimizer."""
        self._reduce(index, grad)
        self.wrapped_optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce the gradients, and update with the wrapped optimizer."""
        self._reduce(index, grad)
        self.wrapped_optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        """The wrapped optimizer's."""
        self.wrapped_optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """The wrapped optimizer's."""
        self.wrapped_optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """The wrapped optimizer's."""
        self.wrapped_optimizer.set_wd_mult(args_wd_mult)

    def _reduce(self, index: Any, grad: Any) -> None:
        if not takes_part(self._process_set) or self._process_set.size() == 1:
            return
        indices, gradients = (index, grad) if isinstance(index, (list, tuple)) else ([index], [grad])
        grouped_allreduce_(
            gradients,
            name="optimizer." + ".".join(map(str, indices)),
            prescale_factor=1.0 / self._predivide_factor,
            postscale_factor=self._predivide_factor,
            process_set=self._process_set,
            op=ReduceOp.AVERAGE,
        )
