"""A module that each process makes with the user's function.

No process gets it from another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.model_factory import name_of
from hvd_cluster.estimators.run.random_state import set_aside
from hvd_cluster.estimators.torch import made_state

#: Positional or named arguments of a module.
Arguments = list[torch.Tensor] | dict[str, torch.Tensor]

GUARD_TEXT = (
    "frozen parameters and buffers are not sent or saved, because the factory makes them again: load them from a file, "
    "or seed the generator that they come from"
)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The user's function, and what it has made in the driver.

    It must make the same everywhere.
    """

    factory: Callable[[], Any]
    #: The generators of torch, NumPy and Python are seeded with it for the factory.
    seed: int
    #: The arguments of a call that gives lazy layers their shapes; None if no layer is lazy.
    features: Arguments | None = field(default=None, repr=False)
    #: See :func:`made_state.contents`.
    made: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The factory in messages."""
        return name_of(self.factory)

    @classmethod
    def of(cls, factory: Callable[[], Any], seed: int) -> tuple[ModelSource, torch.nn.Module]:
        """For a factory of the user, with the module that it makes.

        Lazy layers have no shape yet: then ``made`` is empty.

        Raises:
            DataError: as :meth:`build`.
        """
        source = cls(factory=factory, seed=seed)
        model = source.build()
        return (source, model) if is_lazy(model) else (source.recording(model), model)

    def recording(self, model: torch.nn.Module) -> ModelSource:
        """The same, with ``model`` as what the factory makes."""
        return dataclasses.replace(self, made=made_state.contents(model))

    def sized(self, features: Arguments) -> tuple[ModelSource, torch.nn.Module]:
        """The same for a module with lazy layers, and a module in which they have shapes.

        Args:
            features: the arguments of the module for a few rows, on the CPU.
        """
        source = dataclasses.replace(self, features=features)
        model = source.build()
        return source.recording(model), model

    def without_values(self) -> torch.nn.Module | None:
        """A new module if its parameters are all on the meta device; else None."""
        with set_aside(self.seed):
            model = self._called()
        return model if all(parameter.is_meta for parameter in model.parameters()) else None

    def _called(self) -> torch.nn.Module:
        try:
            model = self.factory()
        except Exception as error:  # the user's own code, which may raise anything
            raise DataError(f"model: {self.name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(model, torch.nn.Module):
            raise DataError(
                f"model: {self.name} must return a torch.nn.Module, and returned "
                f"{'None' if model is None else f'an object of type {type(model).__name__}'}"
            )
        return model

    def build(self) -> torch.nn.Module:
        """A new module on the CPU, in which every parameter has a shape and values.

        Raises:
            DataError: the factory failed or returned something else, or a layer cannot get values.
        """
        with set_aside(self.seed):
            model = self._called()
            _give_values(model)
            if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers())):
                model = model.cpu()
            if self.features is not None:
                _give_shapes(model, self.features)
        return model

    def built_again(self) -> torch.nn.Module:
        """:meth:`build`, which must make what it has made before.

        Raises:
            DataError: it makes another module; the text names the first tensor that differs.
        """
        model = self.build()
        if difference := self.difference(model):
            raise DataError(self.refusal(difference))
        return model

    def difference(self, model: torch.nn.Module) -> str:
        """How an untrained ``model`` differs from what the factory made; else empty."""
        return made_state.first_difference(self.made, made_state.contents(model))

    def refusal(self, difference: str) -> str:
        """The error for a :meth:`difference`."""
        return f"model: {self.name} does not always make the same model: {difference}; {GUARD_TEXT}"


def is_lazy(model: torch.nn.Module) -> bool:
    """Whether parameters or buffers have no shape yet, as in ``LazyLinear``."""
    return any(torch.nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _give_shapes(model: torch.nn.Module, features: Arguments) -> None:
    """Call the module, so that lazy layers get their shapes and initial values."""
    model.eval()  # keeps running means
    try:
        with torch.no_grad():
            model(**features) if isinstance(features, dict) else model(*features)
    except Exception as error:  # the user's own code
        raise DataError(f"model: the call that sizes lazy layers failed: {type(error).__name__}: {error}") from error


def _give_values(model: torch.nn.Module) -> None:
    """Make meta parameters and buffers on the CPU, with their initial values.

    Others keep their values, also in a module of which some are on the meta device.

    Raises:
        DataError: a module has no ``reset_parameters()``.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if any(one.is_meta for one in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    }
    resets = {name: _reset_of(module) for name, module in found.items()}
    if lost := [name or "the module" for name, reset in resets.items() if reset is None]:
        raise DataError(
            f"model: {', '.join(lost[:5])} on the meta device cannot get values without reset_parameters(): define "
            'it, or make these modules outside of torch.device("meta")'
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, module in found.items():
        loaded = {
            key: (one, one.data)
            for key, one in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if not one.is_meta
        }
        module.to_empty(device="cpu", recurse=False)
        resets[name]()  # type: ignore[misc]
        for key, (one, data) in loaded.items():
            one.data = data  # to_empty() gives the tensor itself other memory
            setattr(module, key, one)
    for first, *others in names.values():  # to_empty() separates tied weights
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def _reset_of(module: torch.nn.Module) -> Callable[[], Any] | None:
    """The method that gives a module its initial values.

    MultiheadAttention's has an underscore.
    """
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
