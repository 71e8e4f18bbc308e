"""The names of an optimizer's parameters, and the groups that the user chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_cluster.engine.fusion import group_indices


def named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """A unique name for every parameter of the optimizer, in the order of its groups.

    Raises:
        ValueError: ``named_parameters`` does not give one.
    """
    if named_parameters is None:
        return {
            parameter: f"noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    pairs: list[Any] = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}")
    names = {parameter: name for name, parameter in pairs}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unnamed = sum(parameter not in names for parameter in parameters)
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {unnamed} of the optimizer's {len(parameters)} parameters were not "
            "named in it: pass model.named_parameters() of the whole model, or nothing."
        )
    return {parameter: names[parameter] for parameter in parameters}


def named_now(optimizer: torch.optim.Optimizer, known: Mapping[torch.Tensor, str]) -> dict[torch.Tensor, str]:
    """A unique name for every parameter of the optimizer now: known, or by position."""
    used = set(known.values())
    names: dict[torch.Tensor, str] = {}
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            name = known.get(parameter)
            if name is None:
                name = f"noname.{i}.{j}"
                while name in used:
                    name += "'"
                used.add(name)
            names[parameter] = name
    return names


def resolve_groups(
    groups: int | Sequence[Iterable[torch.Tensor]] | None,
    names: dict[torch.Tensor, str],
) -> list[list[torch.Tensor]]:
    """The user's groups as lists of the optimizer's parameters.

    Other tensors, such as frozen ones, are left out.

    Raises:
        ValueError: ``groups`` is neither a number of groups nor lists of tensors, or has a tensor twice.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups={groups} must be >= 0, or a list of lists of parameters")
        # Ranks may list parameters in different orders: the first rank's groups are used (gradient_layout.py). Do not
        # communicate here: a new rank of an elastic job makes its optimizer while the others are elsewhere.
        order = list(names)
        return [[order[index] for index in group] for group in group_indices(groups, order)]
    if not isinstance(groups, (list, tuple)):  # what follows raises ValueError as Horovod does
        raise ValueError(f"groups should be a non-negative integer or a list of lists of tensors, not {groups!r}")
    members: set[torch.Tensor] = set()
    resolved: list[list[torch.Tensor]] = []
    for group in groups:
        resolved.append([])
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups must be lists of tensors; one contains a {type(parameter).__name__}")
            if parameter not in names:
                continue
            if parameter in members:
                raise ValueError(f"a tensor can only appear once in groups; {names[parameter]!r} appears twice")
            members.add(parameter)
            resolved[-1].append(parameter)
    return [group for group in resolved if len(group) > 1]
