"""A Gluon trainer that averages gradients over all ranks."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from hvd_cluster.engine.membership import takes_part
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.mxnet.compression import Compression, Compressor
from hvd_cluster.mxnet.ops import grouped_allreduce


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc,unused-ignore]
    """``mx.gluon.Trainer`` that averages gradients over all ranks before each step.

    Args:
        params: the result of ``block.collect_params()``, the same on all ranks.
        optimizer: as for ``mx.gluon.Trainer``; a ``DistributedOptimizer`` is unwrapped.
        optimizer_params: as for ``mx.gluon.Trainer``.
        compression: how gradients are compressed for transfer.
        gradient_predivide_factor: divides an average by this before the sum and by the rest after it.
        prefix: a prefix of the names of the requests, for several trainers whose steps are in no fixed order.
        num_groups: the number of requests per step; 0 for one.
        process_set: the ranks that take part; other ranks apply their own gradients.

    Raises:
        ValueError: ``num_groups`` is negative, or ``gradient_predivide_factor`` is 0.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._hvd_config = ReductionConfig(
            compression=compression,
            predivide_factor=gradient_predivide_factor,
            groups=num_groups,
            process_set=process_set,
        )
        optimizer = getattr(optimizer, "wrapped_optimizer", optimizer)
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._hvd_prefix = prefix or ""

    def _allreduce_grads(self) -> None:
        config = self._hvd_config
        if not takes_part(config.process_set) or config.process_set.size() == 1:
            return
        gradients = [p.list_grad()[0] for p in self._params if p.grad_req != "null"]
        groups = config.group_indices(gradients) or ([list(range(len(gradients)))] if gradients else [])
        for number, group in enumerate(groups):
            compressed = [config.compression.compress(gradients[index]) for index in group]
            reduced = grouped_allreduce(
                [tensor for tensor, _ in compressed],
                name=f"{self._hvd_prefix}trainer.{number}",
                prescale_factor=1.0 / config.predivide_factor,
                postscale_factor=config.predivide_factor,
                process_set=config.process_set,
                op=config.op,
            )
            for index, tensor, (_, context) in zip(group, reduced, compressed, strict=True):
                gradients[index][:] = config.compression.decompress(tensor, context)
