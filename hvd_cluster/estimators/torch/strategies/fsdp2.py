"""``sharding="fsdp2"``: which modules ``fully_shard`` wraps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

#: Modules that use the parameters of the modules in them without calling these, so that only the whole is wrapped.
_UNDIVIDED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.utils.parametrize.ParametrizationList,
)
#: They have no ``forward`` that gathers their parameters.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, kw_only=True)
class FSDP2:
    """``sharding=FSDP2(...)``: divide parameters, gradients and optimizer state.

    They are divided among the workers. ``fully_shard`` of torch wraps some modules of the model, and the model itself.
    A worker holds its part of each parameter, and the complete parameters of a wrapped module only while that module
    computes.

    Args:
        wrap: classes of the modules to wrap, or their names, or one of them; () for a choice by size.
        min_num_params: without ``wrap``, a module with at least this many parameters that no module in it has is
            wrapped.
        activation_checkpointing: compute the activations of the wrapped modules again in the backward pass, instead of
            keeping them.

    Raises:
        ValueError: a value is out of range.
    """

    wrap: tuple[type[nn.Module] | str, ...] | type[nn.Module] | str = ()
    min_num_params: int = 1_000_000
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        one: Any
        for one in self._classes:
            if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
                raise ValueError(f"FSDP2 with wrap={one!r}: it must be a class of modules, or its name")
        if self.min_num_params < 1:
            raise ValueError(f"FSDP2 with min_num_params={self.min_num_params}: it must be at least 1")

    @property
    def _classes(self) -> tuple[type[nn.Module] | str, ...]:
        return self.wrap if isinstance(self.wrap, tuple) else (self.wrap,)

    def wrapped(self, model: nn.Module) -> list[str]:
        """Names of the modules to wrap, inner ones first; the model is not among them.

        Raises:
            ValueError: the model has none of the classes of ``wrap``.
        """
        chosen: list[str] = []
        left = _Left(model)
        for name, module in _inner_first(model, ""):
            if not name or isinstance(module, CONTAINERS) or left.shares_parameters(name, module):
                continue
            is_wanted = self._is_of_class(module) if self._classes else left.count(module) >= self.min_num_params
            if is_wanted and left.count(module):
                left.take(module)
                chosen.append(name)
        if self._classes and not chosen and not self._is_of_class(model):
            classes = sorted({type(module).__name__ for module in model.modules()})
            names = ", ".join(one if isinstance(one, str) else one.__name__ for one in self._classes)
            raise ValueError(f"sharding: FSDP2(wrap=...) names {names}, and the model has {', '.join(classes)}")
        return chosen

    def _is_of_class(self, module: nn.Module) -> bool:
        return any(
            any(cls.__name__ == one for cls in type(module).__mro__)
            if isinstance(one, str)
            else isinstance(module, one)
            for one in self._classes
        )


class _Left:
    """The parameters that no wrapped module has yet, and those of several modules."""

    def __init__(self, model: nn.Module) -> None:
        self._taken: set[int] = set()
        #: The names of the modules that have a parameter, by the parameter.
        self._owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(name)

    def count(self, module: nn.Module) -> int:
        return sum(one.numel() for one in module.parameters() if id(one) not in self._taken)

    def take(self, module: nn.Module) -> None:
        self._taken.update(id(one) for one in module.parameters())

    def shares_parameters(self, name: str, module: nn.Module) -> bool:
        """Whether a parameter of the module belongs to one outside, as tied weights do."""
        return any(
            owner != name and not owner.startswith(f"{name}.")
            for one in module.parameters()
            for owner in self._owners[id(one)]
        )


def _inner_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(module, _UNDIVIDED):
        for key, child in module.named_children():
            yield from _inner_first(child, f"{name}.{key}" if name else key)
    yield name, module
