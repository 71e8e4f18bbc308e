"""Tensors of a model and its optimizer by name; ranks may hold parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hvd_cluster.estimators.torch.model_pickling import with_versions
from hvd_cluster.estimators.torch.optimizer_state import holder
from hvd_cluster.estimators.torch.strategies.shards import Shards

#: The name of the state of an optimizer that all ranks share, or of rank 0's.
SHARED_NAME = "optimizer"

#: Complete shape and dtype of a tensor.
Shape = tuple[torch.Size, torch.dtype]


def tensors_of(model: Mapping[str, Any], *optimizers: Any) -> dict[str, torch.Tensor]:
    """All tensors of a model's state and of this rank's optimizers.

    They share memory with these. Optimizers that train apart have states by other names on each rank.

    Args:
        model: the state to keep.
        optimizers: their states, by the position of the parameter.
    """
    found = {f"model.{name}": value for name, value in model.items() if isinstance(value, torch.Tensor)}
    for optimizer in optimizers:
        for index, entry in _entries(optimizer).items():
            name = f"{_own_name(optimizer)}.{index}"
            found |= {f"{name}.{key}": one for key, one in entry.items() if isinstance(one, torch.Tensor)}
        if (exchange := getattr(optimizer, "exchange", None)) is not None:
            found |= {f"exchange.{key}": one for key, one in exchange.state().items()}
    return found


def _own_name(optimizer: Any) -> str:
    """The name of this rank's state of an optimizer."""
    name: str = getattr(optimizer, "state_name", SHARED_NAME)
    return name


def others_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`tensors_of` leaves out of a model's state."""
    return with_versions({name: one for name, one in model.items() if not isinstance(one, torch.Tensor)}, model)


def rest_of(optimizer: Any) -> dict[str, Any]:
    """What :func:`tensors_of` leaves out of an optimizer's state, as a state dict.

    That is other values, and the options of the groups.
    """
    state = {
        index: {key: one for key, one in entry.items() if not isinstance(one, torch.Tensor)}
        for index, entry in _entries(optimizer).items()
    }
    groups, start = [], 0
    for group in optimizer.param_groups:
        positions = list(range(start, start + len(group["params"])))
        groups.append({**group, "params": positions})
        start += len(positions)
    undivided = [name for name, one in tensors_of({}, optimizer).items() if _is_undivided(one)]
    entries = {index: entry for index, entry in state.items() if entry}
    return {"state": entries, "param_groups": groups, "undivided": undivided}


def _is_undivided(value: torch.Tensor) -> bool:
    return isinstance(value, DTensor) and all(one.is_replicate() for one in value.placements)


def load_model(
    model: torch.nn.Module, shards: Shards, others: Mapping[str, Any], *, is_whole: bool, alone: bool
) -> None:
    """Load this rank's part of what :func:`tensors_of` and :func:`others_of` gave.

    The number of ranks may have changed.

    Args:
        is_whole: all tensors of the model's state must be there, not only its trainable parameters.
        alone: only this process reads; else every rank takes part.

    Raises:
        RuntimeError: the shards are of another model.
    """
    shapes = shards.shapes()
    state = {f"model.{name}": one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
    stored = {name for name in shapes if name.startswith("model.")}
    trainable = {f"model.{name}" for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
    needed = set(state) if is_whole else trainable & set(state)
    _require(stored <= state.keys(), "unexpected", stored - state.keys())
    _require(needed <= stored, "missing", needed - stored)
    targets = {name: state[name] for name in stored}
    _require(
        all(shapes[name][0] == one.shape for name, one in targets.items()),
        "of another shape",
        {name for name, one in targets.items() if shapes[name][0] != one.shape},
    )
    shards.read(targets, alone=alone)
    model.load_state_dict(others, strict=False)


def name_in_shards(optimizer: Any, number: int) -> None:
    """Name one of several optimizers of a fit; the first keeps the usual name."""
    if number:
        optimizer.state_name = f"{SHARED_NAME}_{number}"


def load_optimizer(optimizer: Any, shards: Shards, rest: Mapping[str, Any], *, alone: bool) -> None:
    """Load this rank's part of what :func:`tensors_of` and :func:`rest_of` gave.

    Load the model first.

    Args:
        alone: only this process reads; else every rank takes part.

    Raises:
        RuntimeError: the shards are of another optimizer.
    """
    parameters, own = _parameters(optimizer), _own_positions(optimizer)
    exchange = getattr(optimizer, "exchange", None)
    _require(
        [len(group["params"]) for group in rest["param_groups"]]
        == [len(group["params"]) for group in optimizer.param_groups],
        "the optimizer has other param groups",
        (),
    )
    shapes, own_name = shards.shapes(), _own_name(optimizer)
    if not any(name.startswith(f"{own_name}.") for name in shapes):
        own_name = own_name.partition("-")[0]  # there were fewer ranks
    undivided = set(rest.get("undivided", ()))
    targets: dict[str, torch.Tensor] = {}
    exchanged: dict[str, torch.Tensor] = {}
    entries: dict[int, dict[str, Any]] = {}
    for name, shape in shapes.items():
        kind, _, place = name.partition(".")
        index, _, key = place.partition(".")
        if kind == own_name and int(index) in own:
            targets[name] = _like(parameters[int(index)], shape, name not in undivided)
            entries.setdefault(int(index), {})[key] = targets[name]
        elif kind == "exchange" and exchange is not None and exchange.needs(place):
            exchanged[place] = targets[name] = torch.zeros(shape[0], dtype=shape[1])
    shards.read(targets, alone=alone)
    for index, entry in rest["state"].items():
        if index in own:
            entries.setdefault(index, {}).update(entry)
    optimizer.load_state_dict({"state": entries, "param_groups": rest["param_groups"]})
    if holder(optimizer) is not optimizer:
        optimizer.state.clear()  # ZeRO has copied it
    if exchange is not None:
        exchange.load(exchanged)


def _require(condition: bool, text: str, names: Iterable[str]) -> None:
    if not condition:
        raise RuntimeError(f"{text}: {', '.join(sorted(names)[:5])}")


def state_part(value: Any, parameter: torch.Tensor, is_divided: bool = True) -> Any:
    """This rank's part of an entry of an optimizer's complete state.

    It is divided like the parameter if that is possible. Unless ``is_divided``, each rank has all of it. It is a
    DTensor also if it has another shape, as statistics of rows have: steps compute them from DTensors, which do not mix
    with plain tensors.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or (is_divided and not value.dim()):
        return value

    def is_divisible(dim: int) -> bool:
        return is_divided and dim < value.dim() and value.shape[dim] == parameter.shape[dim]

    placements = [
        one if isinstance(one, Shard) and is_divisible(one.dim) else Replicate() for one in parameter.placements
    ]
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, placements, src_data_rank=None)


def _like(parameter: torch.Tensor, shape: Shape, is_divided: bool) -> torch.Tensor:
    """Memory for a part of an optimizer's state."""
    size, dtype = shape
    if is_divided and size == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    part: torch.Tensor = state_part(torch.zeros(size, dtype=dtype), parameter, is_divided)
    return part


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _entries(optimizer: Any) -> dict[int, dict[str, Any]]:
    """The state that this rank holds, by parameter positions in the param groups."""
    positions = {id(parameter): index for index, parameter in enumerate(_parameters(optimizer))}
    return {positions[id(parameter)]: entry for parameter, entry in holder(optimizer).state.items()}


def _own_positions(optimizer: Any) -> set[int]:
    """The positions of the parameters whose state this rank holds."""
    own = {id(parameter) for parameter in _parameters(holder(optimizer))}
    return {index for index, parameter in enumerate(_parameters(optimizer)) if id(parameter) in own}
