"""Wrapping of an optimizer by a subclass that shares all state with the original."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.engine.compiled_steps import keep_untraced

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


def wrap(optimizer: torch.optim.Optimizer, methods: type[Wrapper]) -> Any:
    """An instance of a subclass of ``optimizer``'s class, with ``methods`` first.

    The subclass has the same name.
    """
    keep_untraced()
    cls: Any = type(type(optimizer).__name__, (methods, type(optimizer)), {})
    wrapped = cls.__new__(cls)
    # Instance attributes are shared, except the step() with which a scheduler has replaced the original's.
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in ("step", "zero_grad")})
    wrapped._original = weakref.ref(optimizer)
    return wrapped


def unwrapped(plain_class: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that :meth:`Wrapper.plain` describes, to be wrapped again."""
    optimizer = plain_class.__new__(plain_class)
    optimizer.__setstate__(state)
    return optimizer


def load_in_place(
    optimizer: torch.optim.Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
) -> None:
    """Load a state dict with ``load``; keep the parameter groups' list and dicts.

    ``load_state_dict`` replaces them, so a program that sets a rate through a group which it read before would set it
    only on ranks that did not load.
    """
    groups = optimizer.param_groups
    is_around = "param_groups" not in optimizer.__dict__  # it computes them from those of another optimizer
    load(state_dict)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if loaded is not group:
            group.clear()
            group.update(loaded)
    if is_around:
        optimizer.param_groups[:] = groups
    else:
        optimizer.param_groups = groups


def load_unchanged(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict in place, and undo the casts.

    torch gives state tensors the dtype of their parameter.
    """
    load_in_place(optimizer, optimizer.load_state_dict, state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in state_dict.get("state", {}).items():
        if isinstance(index, int) and parameters[index] in optimizer.state:
            optimizer.state[parameters[index]] = entry


class Wrapper(_Base):
    """Keeps the original optimizer valid for code that has a reference to it."""

    #: The wrapped optimizer; schedulers may have a reference to it.
    _original: Callable[[], torch.optim.Optimizer | None]

    def mark_stepped(self) -> None:
        """Set the attribute that schedulers of this optimizer or of the original check."""
        for stepped in (self, self._original()):
            if stepped is not None:
                stepped._opt_called = True  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer or of an unwrapped one."""
        load_in_place(self, super().load_state_dict, state_dict)
        original = self._original()
        if original is not None and "param_groups" in original.__dict__:  # its schedulers must change the groups in use
            original.param_groups, original.state = self.param_groups, self.state

    def plain(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and the state of the wrapped optimizer, for copies.

        This class cannot be imported by name.
        """
        mro: tuple[Any, ...] = type(self).__mro__[1:]
        return next(base for base in mro if not issubclass(base, Wrapper)), self.__getstate__()
