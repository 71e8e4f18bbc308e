"""HorovodStrategy: how Lightning's Trainer trains on the workers of one world."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.lightning import metrics
from hvd_cluster.lightning.environment import HorovodEnvironment
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.lightning.optimizers import (
    distribute,
    finish_reduction,
    no_reduction,
    restore,
    scale_rates,
    share_state,
)
from hvd_cluster.lightning.sync_batch_norm import HorovodSyncBatchNorm
from hvd_cluster.torch.functions import share_buffers

_ParallelStrategy: Any = submodule("strategies").ParallelStrategy
_TorchSyncBatchNorm: Any = submodule("plugins.layer_sync").TorchSyncBatchNorm
_FITTING: Any = submodule("trainer.states").TrainerFn.FITTING

#: Lightning's names of reductions, torch.distributed's among them.
_OPS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
    "prod": hvd.Product,
}


class HorovodStrategy(_ParallelStrategy):
    """Lightning on the workers that hvdrun, ``spark.run``, Ray, ``local.run``, torchrun, MPI or Slurm has started.

    ::

        trainer = Trainer(strategy=HorovodStrategy(), max_epochs=10)
        trainer.fit(module, loader)

    Every worker runs the same script. Gradients are averaged by ``hvd.DistributedOptimizer`` while the backward pass
    still runs; ``accumulate_grad_batches`` adds them up on each worker first. When ``on_after_backward`` is called they
    are reduced, as under DDP, so that clipping and gradient norms are those of the global batch. All ranks start with
    the weights and the optimizer state of rank 0, and validate, test and predict with its buffers, such as the running
    means of batch normalization. The learning rate stays as configured unless ``scale_lr=True``; ``strategy="horovod"``
    stands for that, since the Horovod strategy of Lightning 1 always multiplied it.

    Loaders get a ``DistributedSampler`` (``use_distributed_sampler``), ``self.log(..., sync_dist=True)`` and
    torchmetrics metrics see all ranks, ``sync_batchnorm=True`` converts to ``hvd.SyncBatchNorm`` for the time of the
    fit. Nothing needs torch.distributed's default group. On GPUs a worker uses the one at its ``local_rank``.

    Args:
        compression: how gradients are compressed for transfer, for example ``hvd.Compression.fp16``.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: as for ``hvd.DistributedOptimizer``.
        groups: likewise.
        sparse_as_dense: likewise.
        scale_lr: multiply the learning rates of the optimizers, and those that torch's schedulers begin from, by the
            number of ranks.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: as for Lightning's own strategies.
    """

    strategy_name = "horovod"
    model: Any
    optimizers: Any

    def __init__(
        self,
        *,
        compression: Any = hvd.Compression.none,
        op: Any = hvd.Average,
        gradient_predivide_factor: float = 1.0,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        scale_lr: bool = False,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=HorovodEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = {
            "compression": compression,
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
        }
        self.scale_lr = scale_lr
        #: The optimizers that the module configured.
        self._configured: list[Any] = []

    # --- who and where ----------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning injects samplers and synchronizes what is logged."""
        return True

    @property
    def num_nodes(self) -> int:
        """The number of hosts; the launcher has decided it, whatever ``Trainer(num_nodes=)`` says."""
        hvd.init()
        return hvd.cross_size()

    @num_nodes.setter
    def num_nodes(self, _: int) -> None: ...

    @property
    def root_device(self) -> torch.device:
        """This worker's device."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type == "cpu":
            return torch.device("cpu")
        if len(devices) > self.local_rank:
            device: torch.device = devices[self.local_rank]
            return device
        return torch.device(devices[0].type, self.local_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which share of the samples is this rank's."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Let the functions that are for rank zero only know who that is. Lightning calls it when a Trainer is made."""
        for module in (submodule("utilities.rank_zero"), import_module("lightning_utilities.core.rank_zero")):
            module.rank_zero_only.rank = self.global_rank

    # --- the course of a fit ----------------------------------------------------------------------------------------

    @property
    def _layer_sync(self) -> Any:
        return self._layers

    @_layer_sync.setter
    def _layer_sync(self, plugin: Any) -> None:
        # What Trainer(sync_batchnorm=True) brings needs torch.distributed.
        self._layers = HorovodSyncBatchNorm() if isinstance(plugin, _TorchSyncBatchNorm) else plugin

    def setup_environment(self) -> None:
        """Enter the world, and take the device.

        Raises:
            RuntimeError: there is no GPU for this worker.
        """
        hvd.init()
        device = self.root_device
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(
                f"rank {self.global_rank} is worker {self.local_rank} of its host, and needs a GPU of its own, but "
                f"only {torch.cuda.device_count()} are visible: start fewer workers per host, or set "
                'Trainer(accelerator="cpu")'
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Make model, optimizers and metrics ready; rank 0's weights become everybody's."""
        if trainer.state.fn == _FITTING and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)
        state = self.lightning_module.state_dict()
        hvd.broadcast_parameters(dict(state), root_rank=0)
        metrics.connect(self.lightning_module)

    @property
    def rate_factor(self) -> float:
        """What the configured learning rates are multiplied by."""
        return float(self.world_size) if self.scale_lr else 1.0

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers``, and distribute what it returns."""
        super().setup_optimizers(trainer)
        self._configured = list(self.optimizers)
        if self.scale_lr:
            groups = [group for optimizer in self._configured for group in getattr(optimizer, "param_groups", ())]
            scale_rates(groups, [vars(scheduler) for scheduler in self._schedulers()], self.rate_factor)
        if self.world_size > 1:
            share_state(self._configured)
        self.optimizers = distribute(self._configured, self._schedulers(), self.lightning_module, self._options)

    def on_validation_start(self) -> None:
        """Have all ranks judge one model, which is the one that rank 0 saves."""
        self._share_buffers()

    def on_test_start(self) -> None:
        """Have all ranks judge one model."""
        self._share_buffers()

    def on_predict_start(self) -> None:
        """Have all ranks use one model."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self.world_size > 1:
            share_buffers(self.lightning_module, root_rank=0)

    def model_to_device(self) -> None:
        """Move the model to this worker's device."""
        self.model.to(self.root_device)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The backward pass; when the hooks behind it run, the gradients are reduced."""
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        finish_reduction(self.optimizers)
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss  # type: ignore[no-any-return]

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes inside are added up on this rank only."""
        return no_reduction(self.optimizers)

    def teardown(self) -> None:
        """Leave a module as it was given, trained; its optimizers are the configured ones again."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        if self._configured:
            self.optimizers = restore(self.optimizers, self._configured, self._schedulers())
            self._configured = []
        super().teardown()

    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.lr_scheduler_configs]

    # --- collectives ------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The reduction of a tensor over all ranks, as a new tensor; anything but a tensor is returned as it is.

        Args:
            tensor: with the same shape and dtype on all ranks; the mean of whole numbers is floating.
            group: a process set whose ranks take part; None for all.
            reduce_op: "mean", "sum", "min", "max" or "product", or torch.distributed's ``ReduceOp`` of that name.

        Raises:
            ValueError: another ``reduce_op`` or ``group``.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op or "mean").rpartition(".")[2].lower()
        if name not in _OPS:
            raise ValueError(f"reduce_op={reduce_op!r} is not supported: use one of {', '.join(sorted(_OPS))}")
        op = _OPS[name]
        if op == hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            # Lightning divides by the mean number of rows: one that is rounded down gives means that are too large.
            tensor = tensor.to(torch.get_default_dtype())
        return hvd.allreduce(tensor.contiguous(), op=op, process_set=_process_set(group))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, have decided so."""
        found = self.reduce(torch.tensor(int(decision)), reduce_op="min" if all else "max")
        return bool(found)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, shape (ranks, *shape).

        With ``sync_grads`` the gradient of this rank's tensor is the sum of what the ranks' results ask for.
        """
        process_set = _process_set(group)
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            gathered = hvd.allgather(tensor.contiguous().unsqueeze(0), process_set=process_set)
        if gathered.requires_grad:
            # Horovod's allgather averages the gradients of the ranks, Lightning's adds them up.
            gathered.register_hook(lambda gradient: gradient * len(gathered))
        return gathered

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has come here."""
        hvd.init()
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``src``'s object, on every rank."""
        hvd.init()
        return hvd.broadcast_object(obj, src)


def _process_set(group: Any) -> Any:
    if group is None:
        return hvd.global_process_set
    if isinstance(group, hvd.ProcessSet):
        return group
    raise ValueError(
        f"group={group!r} is of torch.distributed, which HorovodStrategy does not use: give an hvd.ProcessSet, or None"
    )
