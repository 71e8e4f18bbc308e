"""The parameters of an optimizer: what the ranks call them, and which of them the user has put into one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from hvd_cluster.engine import basics
from hvd_cluster.engine.parts import grouped
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.torch.functions import allgather_object, broadcast_object

#: Of names that differ, in an error.
_MOST_TOLD = 5


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


def names_of_last_group(optimizer: torch.optim.Optimizer, known: Container[torch.Tensor]) -> dict[torch.Tensor, str]:
    """Names for the parameters of the last group that have none yet."""
    index = len(optimizer.param_groups) - 1
    parameters = enumerate(optimizer.param_groups[index]["params"])
    return {parameter: f"noname.{index}.{i}" for i, parameter in parameters if parameter not in known}


def resolve_groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    names: dict[torch.Tensor, str],
    process_set: ProcessSet,
) -> list[list[torch.Tensor]]:
    """The user's groups as lists of parameters.

    Raises:
        ValueError: ``groups`` is neither a number of groups nor lists of the optimizer's parameters; or it is a number,
            and the parameters have other names on some ranks: all ranks get this.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups={groups} must be >= 0, or a list of lists of parameters")
        return _equal_groups(groups, names, process_set)
    if not isinstance(groups, (list, tuple)):  # what follows raises ValueError as Horovod does
        raise ValueError(f"groups should be a non-negative integer or a list of lists of tensors, not {groups!r}")
    members: set[torch.Tensor] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups must consist of lists of tensors; one holds a {type(parameter).__name__}")
            if parameter not in names:
                raise ValueError("groups holds a tensor that is no parameter of the optimizer")
            if parameter in members:
                raise ValueError(f"a tensor can only appear once in groups; {names[parameter]!r} is twice")
            members.add(parameter)
    return [list(group) for group in groups if len(group) > 1]


def _equal_groups(count: int, names: dict[torch.Tensor, str], process_set: ProcessSet) -> list[list[torch.Tensor]]:
    """``count`` runs of about equal length, in the first rank's order of the parameters."""
    by_name = {name: parameter for parameter, name in names.items()}
    order = list(by_name)
    if basics.is_initialized() and basics.size() > 1 and process_set.included():
        root = process_set.ranks[0] if process_set.ranks else 0
        order = broadcast_object(order, root, process_set=process_set)
        _require_equal_names(count, list(by_name), order, process_set)
    return [[by_name[order[index]] for index in group] for group in grouped(count, order)]


def _require_equal_names(count: int, own: list[str], order: list[str], process_set: ProcessSet) -> None:
    """Raise the same error on all ranks where one's names are not the first one's, ``order``."""
    known, wanted = set(own), set(order)
    more, less = [name for name in own if name not in wanted], [name for name in order if name not in known]
    ranks = process_set.ranks or range(basics.size())
    for rank, (has, lacks) in zip(ranks, allgather_object((more, less), process_set=process_set), strict=True):
        differences = [f"{verb} {_told(names)}" for verb, names in (("has", has), ("lacks", lacks)) if names]
        if differences:
            raise ValueError(
                f"groups={count} needs parameters of the same names on all ranks; compared with rank {ranks[0]}, rank "
                f"{rank} {' and '.join(differences)}: make the same model on all ranks"
            )


def _told(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return f"{', '.join(map(repr, names[:_MOST_TOLD]))}{more}"
