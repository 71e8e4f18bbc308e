"""An optimizer without parameters, to rebuild it for a copy of the model.

The copy is in another process.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvd_cluster.estimators.torch.model_pickling import on_cpu

#: What an optimizer has beside its own attributes; the last is from torch's schedulers.
_COMMON = {*vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)), "_opt_called"}
#: Types of attributes that mean the same in a copy. Others, such as lists of parameters, are what the class makes.
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, enum.Enum),
    *(type, types.FunctionType, types.BuiltinFunctionType),
)


@dataclass(frozen=True)
class OptimizerState:
    """Class, hyperparameters and state of an optimizer.

    Its parameters are positions in ``model.parameters()``.
    """

    cls: type[torch.optim.Optimizer]
    #: For each param group: the positions of its parameters, and its hyperparameters.
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]
    defaults: Mapping[str, Any]
    state_dict: Mapping[str, Any]
    #: What the class keeps outside of ``defaults``, such as options.
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> OptimizerState:
        """The state of ``optimizer``, on the CPU.

        Its parameters are those of the model or, if it was built for another copy of the model, are matched to them in
        order.

        Raises:
            ValueError: its parameters are not the model's, or it does not keep an argument without a default.
        """
        parameters = list(model.parameters())
        position = {id(parameter): index for index, parameter in enumerate(parameters)}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not all(id(parameter) in position for parameter in held):
            shapes = [tuple(parameter.shape) for parameter in held]
            if shapes != [tuple(parameter.shape) for parameter in parameters]:
                raise ValueError(
                    f"optimizer: holds {len(held)} parameters that are not those of the model ({len(parameters)} "
                    "parameters); build it with model.parameters()"
                )
            position = {id(parameter): index for index, parameter in enumerate(held)}
        groups = tuple(
            (
                tuple(position[id(parameter)] for parameter in group["params"]),
                on_cpu({name: value for name, value in group.items() if name != "params"}),
            )
            for group in optimizer.param_groups
        )
        own = own_attributes(optimizer)
        known = {*own, *optimizer.defaults, next(iter(inspect.signature(type(optimizer)).parameters), "")}
        if lost := [name for name in _required(type(optimizer)) if name not in known]:
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} is made again on each worker, and does not keep its argument "
                f"{lost[0]!r}: store it as self.{lost[0]}, or in defaults"
            )
        return cls(type(optimizer), groups, on_cpu(dict(optimizer.defaults)), on_cpu(optimizer.state_dict()), own)

    @property
    def given_rates(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(options.get("lr", 0.0)) for _, options in self.groups]

    def at(self, positions: Sequence[Sequence[int]]) -> OptimizerState:
        """The same optimizer of a model in which its parameters have other positions."""
        pairs = zip(positions, self.groups, strict=True)
        return dataclasses.replace(self, groups=tuple((tuple(held), options) for held, (_, options) in pairs))

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the parameters of ``model``, with its state on their device."""
        parameters = list(model.parameters())
        groups = [{"params": [parameters[index] for index in held], **options} for held, options in self.groups]
        optimizer = self.cls(groups, **accepted(self.cls, {**self.attributes, **self.defaults}))
        vars(optimizer).update(self.attributes)
        optimizer.load_state_dict(dict(self.state_dict))
        return optimizer


def accepted(cls: type[torch.optim.Optimizer], known: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the class takes as arguments."""
    parameters = inspect.signature(cls).parameters
    return {name: value for name, value in known.items() if name in parameters}


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes that only this class has, without methods that schedulers replace."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _COMMON and _is_value(value)}
    return {name: value for name, value in own.items() if not (callable(value) and hasattr(type(optimizer), name))}


def _is_value(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_value, value))
    if isinstance(value, dict):
        return all(map(_is_value, [*value, *value.values()]))
    return isinstance(value, _VALUES)


def _required(cls: type[torch.optim.Optimizer]) -> list[str]:
    """The arguments of a class that have no default."""
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(cls).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind in single]


def holder(optimizer: Any) -> Any:
    """The optimizer that has the state.

    ZeroRedundancyOptimizer has one in it for this rank's parameters.
    """
    return optimizer.optim if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else optimizer


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each param group; 0.0 if a group has none."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def set_rates(optimizer: torch.optim.Optimizer, values: list[float]) -> None:
    """Set the learning rate of each param group; a rate that is a tensor stays one."""
    for group, value in zip(optimizer.param_groups, values, strict=True):
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"].fill_(value)
        elif "lr" in group:
            group["lr"] = value


def scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rates, and those from which schedulers begin."""
    set_rates(optimizer, [rate * factor for rate in rates(optimizer)])
    scale_initial_rates(optimizer.param_groups, factor)


def scale_initial_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Multiply the ``initial_lr`` that a scheduler has left in the param groups."""
    for group in groups:
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * factor
