"""HorovodStrategy: Lightning's Trainer on the workers of any launcher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch.nn.parameter import is_lazy

import hvd_cluster.torch as hvd
from hvd_cluster.lightning.environment import HorovodEnvironment
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.lightning.optimizers import (
    backward_pass,
    distribute,
    no_reduction,
    restore,
    scale_rates,
    share_state,
)
from hvd_cluster.lightning.synced_modules import HorovodSyncBatchNorm, connect_metrics
from hvd_cluster.monitor.step_clock import SAVE, step_clock
from hvd_cluster.torch.functions import share_buffers

_ParallelStrategy: Any = submodule("strategies").ParallelStrategy
_TorchSyncBatchNorm: Any = submodule("plugins.layer_sync").TorchSyncBatchNorm
_FITTING: Any = submodule("trainer.states").TrainerFn.FITTING

#: Reductions by the names that Lightning and torch.distributed use.
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
    """Runs a Trainer on the workers that a launcher has started.

    The launcher is hvdrun, ``spark.run``, Ray, ``local.run``, torchrun, MPI or Slurm.

    ::

        trainer = Trainer(strategy=HorovodStrategy(), max_epochs=10)
        trainer.fit(module, loader)

    Every worker runs the same script. ``hvd.DistributedOptimizer`` averages gradients while the backward pass still
    runs; ``accumulate_grad_batches`` first accumulates them on each worker. As with DDP, the gradients are reduced when
    ``on_after_backward`` is called, so clipping and gradient norms are those of the global batch. All ranks start with
    the weights and the optimizer state of rank 0, and validate, test and predict with its buffers, such as the running
    means of batch normalization. The learning rate is not changed unless ``scale_lr=True``; ``strategy="horovod"`` sets
    that, because the Horovod strategy of Lightning 1 always scaled it.

    Loaders get a ``DistributedSampler`` (``use_distributed_sampler``), ``self.log(..., sync_dist=True)`` and
    torchmetrics metrics reduce over all ranks, and ``sync_batchnorm=True`` converts to ``hvd.SyncBatchNorm`` during the
    fit. Nothing needs torch.distributed's default group. With GPUs, a worker uses the one at its ``local_rank``.

    Args:
        compression: how gradients are compressed for transfer, for example ``hvd.Compression.fp16``.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: as for ``hvd.DistributedOptimizer``.
        groups: as for ``hvd.DistributedOptimizer``.
        sparse_as_dense: as for ``hvd.DistributedOptimizer``.
        scale_lr: multiply the learning rates of the optimizers, and the initial ones of torch's schedulers, by the
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
        #: Those that reduce gradients.
        self._reducing: list[Any] = []

    # --- ranks and devices --------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Always True: Lightning injects samplers and synchronizes logged values."""
        return True

    @property
    def num_nodes(self) -> int:
        """The number of hosts, which the launcher determines.

        ``Trainer(num_nodes=...)`` is ignored.
        """
        hvd.init()
        return hvd.cross_size()

    @num_nodes.setter
    def num_nodes(self, _: int) -> None: ...

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type == "cpu":
            return torch.device("cpu")
        if len(devices) > self.local_rank:
            device: torch.device = devices[self.local_rank]
            return device
        return torch.device(devices[0].type, self.local_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of the ``DistributedSampler`` that Lightning injects."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Set the rank for Lightning's ``rank_zero_only`` functions.

        Called when a Trainer is created.
        """
        for module in (submodule("utilities.rank_zero"), import_module("lightning_utilities.core.rank_zero")):
            module.rank_zero_only.rank = self.global_rank

    # --- fit ----------------------------------------------------------------------------------------------------------

    @property
    def _layer_sync(self) -> Any:
        return self._layers

    @_layer_sync.setter
    def _layer_sync(self, plugin: Any) -> None:
        # The plugin of Trainer(sync_batchnorm=True) needs torch.distributed.
        self._layers = HorovodSyncBatchNorm() if isinstance(plugin, _TorchSyncBatchNorm) else plugin

    def setup_environment(self) -> None:
        """Call ``hvd.init()``, and set the device.

        Raises:
            RuntimeError: no GPU is left for this worker.
        """
        hvd.init()
        device = self.root_device
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(
                f"rank {self.global_rank} is worker {self.local_rank} of its host and needs its own GPU, but "
                f"only {torch.cuda.device_count()} are visible: start fewer workers per host, or set "
                'Trainer(accelerator="cpu")'
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Set up model, optimizers and metrics, and broadcast the weights of rank 0.

        Raises:
            ValueError: parameters have no shape yet.
        """
        if trainer.state.fn == _FITTING and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        lazy = [name for name, one in self.lightning_module.named_parameters() if is_lazy(one)]
        if lazy and trainer.state.fn == _FITTING:
            raise ValueError(
                f"{', '.join(lazy)} have no shape yet, as in LazyLinear, so ranks cannot make them equal: give the "
                "layers their sizes, or call them once with rows like those of the data, in configure_model()"
            )
        super().setup(trainer)
        hvd.broadcast_parameters(self._initial_state(), root_rank=0)
        connect_metrics(self.lightning_module)

    def _initial_state(self) -> dict[str, Any]:
        """The entries of the module's state that may differ between ranks at first."""
        return dict(self.lightning_module.state_dict())

    @property
    def rate_factor(self) -> float:
        """The factor of the configured learning rates."""
        return float(self.world_size) if self.scale_lr else 1.0

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers``, and distribute the optimizers that it returns."""
        super().setup_optimizers(trainer)
        self._configured = list(self.optimizers)
        if self.scale_lr:
            groups = [group for optimizer in self._configured for group in getattr(optimizer, "param_groups", ())]
            scale_rates(groups, [vars(scheduler) for scheduler in self._schedulers()], self.rate_factor)
        self._distribute()

    def _distribute(self) -> None:
        """Replace the configured optimizers by those that train."""
        if self.world_size > 1:
            share_state(self._configured)
        self._replace(self._configured)

    def _replace(self, optimizers: Sequence[Any]) -> None:
        """Let distributed optimizers take the steps of these."""
        self.optimizers, self._reducing = distribute(
            optimizers, self._schedulers(), self.lightning_module, self._options
        )

    def on_validation_start(self) -> None:
        """Broadcast rank 0's buffers, so that all ranks validate what it saves."""
        self._share_buffers()

    def on_test_start(self) -> None:
        """Broadcast the buffers of rank 0, so that all ranks test the same model."""
        self._share_buffers()

    def on_predict_start(self) -> None:
        """Broadcast the buffers of rank 0, so that all ranks predict with the same model."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self.world_size > 1:
            share_buffers(self.lightning_module, root_rank=0)

    def model_to_device(self) -> None:
        """Move the model to the device of this worker."""
        self.model.to(self.root_device)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, and wait until its gradients are reduced.

        The hooks after it run then.
        """
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with backward_pass(self._reducing):
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss  # type: ignore[no-any-return]

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Inside, the gradients of backward passes are accumulated on this rank only."""
        return no_reduction(self._reducing)

    @step_clock.span(SAVE)
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, on rank 0."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Restore the original layers and optimizers, with their trained state."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        if self._configured:
            self.optimizers = restore(self.optimizers, self._configured, self._schedulers())
            self._configured = []
        self._reducing = []
        super().teardown()

    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.lr_scheduler_configs]

    # --- collectives --------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, and return a new tensor.

        Other objects are returned unchanged.

        Args:
            tensor: the same shape and dtype on all ranks; the mean of integers is a floating-point tensor.
            group: the process set that takes part; None for all ranks.
            reduce_op: "mean", "sum", "min", "max" or "product", or torch.distributed's ``ReduceOp`` of that name.

        Raises:
            ValueError: ``reduce_op`` or ``group`` is not supported.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op or "mean").rpartition(".")[2].lower()
        if name not in _OPS:
            raise ValueError(f"reduce_op={reduce_op!r} is not supported: use one of {', '.join(sorted(_OPS))}")
        op = _OPS[name]
        if op == hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            # Lightning divides by the mean number of rows, which must not be rounded.
            tensor = tensor.to(torch.get_default_dtype())
        return hvd.allreduce(tensor.contiguous(), op=op, process_set=_process_set(group))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``decision`` is True on all ranks, or on any rank if ``all`` is False."""
        found = self.reduce(torch.tensor(int(decision)), reduce_op="min" if all else "max")
        return bool(found)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, shape (ranks, *shape).

        With ``sync_grads``, the gradient is the sum of the gradients of all ranks with respect to this rank's tensor.
        """
        process_set = _process_set(group)
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            gathered = hvd.allgather(tensor.contiguous().unsqueeze(0), process_set=process_set)
        if gathered.requires_grad:
            # Horovod's allgather averages the gradients of the ranks; Lightning's sums them.
            gathered.register_hook(lambda gradient: gradient * len(gathered))
        return gathered

    def barrier(self, name: str | None = None) -> None:
        """Block until every rank has called this."""
        hvd.init()
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast the object of rank ``src`` to all ranks."""
        hvd.init()
        return hvd.broadcast_object(obj, src)


def _process_set(group: Any) -> Any:
    if group is None:
        return hvd.global_process_set
    if isinstance(group, hvd.ProcessSet):
        return group
    raise ValueError(
        f"group={group!r} is not an hvd.ProcessSet or None: HorovodStrategy does not use torch.distributed"
    )
