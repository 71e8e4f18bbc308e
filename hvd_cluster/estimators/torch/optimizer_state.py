"""An optimizer without its parameters, to build it for a copy of the model in another process."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvd_cluster.estimators.torch.model_pickling import on_cpu


@dataclass(frozen=True)
class OptimizerState:
    """Class, hyperparameters and state of an optimizer, with its parameters as positions in ``model.parameters()``."""

    cls: type[torch.optim.Optimizer]
    #: For each param group: the positions of its parameters, and its hyperparameters.
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]
    defaults: Mapping[str, Any]
    state_dict: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> OptimizerState:
        """The state of ``optimizer``, on the CPU.

        Its parameters are those of the model or, if it was built for another copy of the model, are matched to them in
        order.

        Raises:
            ValueError: its parameters are not the model's.
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
        return cls(type(optimizer), groups, on_cpu(dict(optimizer.defaults)), on_cpu(optimizer.state_dict()))

    @property
    def given_rates(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(options.get("lr", 0.0)) for _, options in self.groups]

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the parameters of ``model``, with its state on their device."""
        parameters = list(model.parameters())
        groups = [{"params": [parameters[index] for index in held], **options} for held, options in self.groups]
        accepted = inspect.signature(self.cls).parameters
        optimizer = self.cls(groups, **{name: value for name, value in self.defaults.items() if name in accepted})
        optimizer.load_state_dict(dict(self.state_dict))
        return optimizer


def holder(optimizer: Any) -> Any:
    """The optimizer that has the state: ZeroRedundancyOptimizer has one for this rank's parameters in it."""
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
    """Multiply the ``initial_lr`` that an earlier scheduler of torch has left in the param groups."""
    for group in groups:
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * factor
