"""An optimizer with our methods in front of its own, which shares everything with the one that it wraps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.engine.untraced import keep_untraced

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


def wrap(optimizer: torch.optim.Optimizer, methods: type[Wrapper]) -> Any:
    """An instance of a subclass of ``optimizer``'s class, of the same name, with ``methods`` in front."""
    keep_untraced()
    cls: Any = type(type(optimizer).__name__, (methods, type(optimizer)), {})
    wrapped = cls.__new__(cls)
    # Instance attributes are shared, but not the step() that a scheduler has put in front of the original's own.
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in ("step", "zero_grad")})
    wrapped._original = weakref.ref(optimizer)
    return wrapped


def unwrapped(plain_class: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    """What :meth:`Wrapper.plain` describes, as an optimizer that can be wrapped again."""
    optimizer = plain_class.__new__(plain_class)
    optimizer.__setstate__(state)
    return optimizer


class Wrapper(_Base):
    """What every wrapped optimizer owes to those who hold the original."""

    #: The optimizer that was wrapped; schedulers may hold it.
    _original: Callable[[], torch.optim.Optimizer | None]

    def mark_stepped(self) -> None:
        """Leave the mark that a scheduler looks for, of this optimizer or of the original."""
        for stepped in (self, self._original()):
            if stepped is not None:
                stepped._opt_called = True  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer or of an unwrapped one."""
        super().load_state_dict(state_dict)
        original = self._original()
        if original is not None:  # schedulers that hold it act on the groups that are in use
            original.param_groups, original.state = self.param_groups, self.state

    def plain(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and the state of the optimizer inside, for a copy: our own class has no name to import."""
        mro: tuple[Any, ...] = type(self).__mro__[1:]
        return next(base for base in mro if not issubclass(base, Wrapper)), self.__getstate__()
