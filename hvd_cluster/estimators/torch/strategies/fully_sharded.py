"""A model and optimizer in parts on the ranks, by torch's ``fully_shard``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.initial_model import initial_model, share_weights
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.estimators.torch.optimizer_state import OptimizerState
from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2
from hvd_cluster.estimators.torch.strategies.parts import state_part
from hvd_cluster.estimators.torch.strategies.strategy import HALF_DTYPES, ReadyGradients, ShardingStrategy
from hvd_cluster.torch.functions import broadcast_parameters
from hvd_cluster.torch.wrapper import wrap


class FullySharded(ShardingStrategy):
    """The strategy of workers that hold parts of parameters and optimizer state."""

    holds_all = False
    casts = True

    def begin(self, hvd: Collectives, device: torch.device) -> tuple[nn.Module, Any]:
        spec = self._spec
        model = sharded_model(spec.model, hvd, spec.sharding, device, spec.mixed_precision)
        return model, wrap(sharded_optimizer(spec.optimizer, model), ReadyGradients)

    def release(self, model: nn.Module) -> None:
        reshard(model)


def sharded_model(
    given: nn.Module | ModelSource, hvd: Collectives, config: FSDP2, device: torch.device, mixed_precision: str | None
) -> nn.Module:
    """This rank's part of the model that training begins with; every rank takes part.

    If a factory makes all parameters on the meta device, only rank 0 ever holds the complete model.
    """
    empty = given.without_values() if isinstance(given, ModelSource) else None
    whole = initial_model(given, hvd, empty)
    if empty is None:
        share_weights(whole, given)
        shard(whole, config, device, mixed_precision)
        return whole
    shard(empty, config, device, mixed_precision)
    fill(empty, whole, hvd, device)
    return empty


def fill(empty: nn.Module, whole: nn.Module, hvd: Collectives, device: torch.device) -> None:
    """Give a divided model of the meta device the values of rank 0's ``whole``.

    Every rank takes part.
    """
    empty.to_empty(device=device)
    set_model_state_dict(
        empty,
        whole.state_dict(),  # of the other ranks, only the versions of modules count
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    buffers = dict(empty.named_buffers())
    if hvd.rank() == 0:
        for name, buffer in whole.named_buffers():
            buffers[name].copy_(buffer)
    broadcast_parameters(buffers, root_rank=0)


def shard(
    model: nn.Module,
    config: FSDP2,
    device: torch.device,
    mixed_precision: str | None,
    outer_names: Sequence[str] = ("",),
) -> None:
    """Divide the parameters of ``model`` among all ranks, in place.

    It moves this rank's part to the device. Every rank takes part, with equal values of the parameters.

    Args:
        outer_names: the modules that are called from outside; by default the model itself.
        mixed_precision: "bf16" or "fp16": the dtype in which modules compute and parameters are gathered. Gradients are
            reduced in float32, and the model returns float32. Batch normalization computes in float32.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    inner, outer = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    names = [name for name in config.wrapped(model) if name not in outer_names]
    if mixed_precision is not None:
        half = HALF_DTYPES[mixed_precision]
        make = functools.partial(MixedPrecisionPolicy, param_dtype=half, reduce_dtype=torch.float32)
        inner, outer = make(), make(output_dtype=torch.float32)
        # batch_norm needs weights and running statistics of one dtype, and no policy casts the statistics.
        norms = [name for name, module in model.named_modules() if name and isinstance(module, _BatchNorm)]
        names = [name for name in names if name not in norms]
        for name in norms:
            single = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=half)
            fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=single)
    if config.activation_checkpointing:
        for name in names:
            checkpoint(model.get_submodule(name))
    for name in names:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=inner)
    # What calls all others keeps its parameters for the backward pass, which begins with it.
    is_root = list(outer_names) == [""]
    for name in outer_names:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=outer, reshard_after_forward=not is_root)


def reshard(model: nn.Module) -> None:
    """Leave only this rank's part of what passes without a backward pass gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sharded_optimizer(given: OptimizerState, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model that :func:`shard` has divided.

    It has this rank's part of the optimizer's state.
    """
    parameters = list(model.parameters())
    held = [parameters[index] for positions, _ in given.groups for index in positions]
    state = sharded_state(given.state_dict["state"], held)
    own = dataclasses.replace(given, state_dict={**given.state_dict, "state": state})
    return own.build(model)


def sharded_state(state: Mapping[int, Mapping[str, Any]], parameters: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """This rank's part of an optimizer's complete state, by parameter positions.

    They are positions in its groups.
    """

    return {
        number: {key: state_part(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state.items()
    }


def whole(state: Any, keep: bool) -> Any:
    """The same nest with complete CPU tensors in place of DTensors.

    Every rank takes part.

    Args:
        keep: on this rank; else empty tensors take their places.
    """

    def gathered(tensor: Any) -> torch.Tensor:
        found = tensor.full_tensor()
        return found.cpu() if keep else torch.empty(0)

    return tree_map_only(DTensor, gathered, state)
