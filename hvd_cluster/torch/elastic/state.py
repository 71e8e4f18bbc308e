"""The state of a torch training function: models, optimizers, schedulers, samplers and plain values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_cluster.elastic.notification import agree_on_update
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.elastic.state import copied as copied_value
from hvd_cluster.engine import basics
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.torch.elastic.sampler import ElasticSampler
from hvd_cluster.torch.elastic.snapshot import copied
from hvd_cluster.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hvd_cluster.torch.wrapper import load_unchanged


class StateHandler:
    """How one kind of object is saved, restored and synchronized between ranks."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Keep a copy of the object's state dict, reusing the memory of the previous copy."""
        self._saved = copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        """Load what was saved last."""
        self.value.load_state_dict(copied(self._saved))

    def sync(self) -> None:
        """Load rank 0's state. Do not save it here: the state saves all objects when it has received all of them."""
        raise NotImplementedError(f"{type(self).__name__} does not implement sync()")

    def reset(self) -> None:
        """Adapt to a new world."""

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """A ``torch.nn.Module``."""

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)  # copies into the model's own tensors

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        if modules := [module for module in self.value.modules() if _has_extra_state(module)]:
            extra = broadcast_object([module.get_extra_state() for module in modules])
            if basics.rank() != 0:
                for module, state in zip(modules, extra, strict=True):
                    module.set_extra_state(state)


class OptimizerStateHandler(StateHandler):
    """A ``torch.optim.Optimizer``, wrapped or not."""

    def restore(self) -> None:
        try:
            load_unchanged(self.value, copied(self._saved))
        except HorovodInternalError:
            # Raised by gradients that were being reduced when the world ended; they are discarded now.
            load_unchanged(self.value, copied(self._saved))
        for group in self.value.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # of the unfinished step

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class PacerStateHandler(StateHandler):
    """A learning rate scheduler, a GradScaler, or another object with a state dict that is not to be copied itself.

    A copy of it would act on a copy of the optimizer.
    """

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class SamplerStateHandler(PacerStateHandler):
    """An :class:`~hvd_cluster.torch.elastic.sampler.ElasticSampler`."""

    def reset(self) -> None:
        self.value.reset()


class ContainerStateHandler(StateHandler):
    """A list, tuple or dict of objects that have handlers, such as the two optimizers of a GAN, and of plain values."""

    def __init__(self, value: Any, handlers: dict[Any, StateHandler]) -> None:
        self.value = value
        #: By index or key.
        self._handlers = handlers
        self._saved = copied_value(self._plain())

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        self._saved = copied_value(self._plain())

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        self._set_plain(copied_value(self._saved))

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        self._set_plain(broadcast_object(self._plain()))

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def set_value(self, value: Any) -> None:
        self.value, self._handlers = value, _handlers_in(value)
        self._saved = copied_value(self._plain())

    def _plain(self) -> dict[Any, Any]:
        """The values that have no handlers; a tuple keeps its own."""
        if isinstance(self.value, tuple):
            return {}
        return {key: entry for key, entry in _entries(self.value) if key not in self._handlers}

    def _set_plain(self, values: dict[Any, Any]) -> None:
        for key, value in values.items():
            self.value[key] = value


def _has_extra_state(module: torch.nn.Module) -> bool:
    """Whether the module saves and loads more than tensors, by the methods that ``torch.nn.Module`` only declares."""
    kind, base = type(module), torch.nn.Module
    return kind.get_extra_state is not base.get_extra_state and kind.set_extra_state is not base.set_extra_state


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, PacerStateHandler),
    (torch.amp.GradScaler, PacerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The handler of each class; the first matching entry is used."""
    return _registry


def set_handler_registry(registry: Iterable[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry for states that are created from now on."""
    _registry[:] = registry


class TorchState(ObjectState):
    """The state of a torch training function that survives the loss of workers.

    If an attribute has a handler, assigning to it passes the new object to the handler, which saves it.

    Args:
        model: a module.
        optimizer: an optimizer.
        kwargs: further modules, optimizers, learning rate schedulers, scalers, samplers, other objects with
            ``state_dict`` and ``load_state_dict``, lists and dicts of such objects, and picklable values: ``epoch=0,
            batch=0``.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {**kwargs, **{n: v for n, v in (("model", model), ("optimizer", optimizer)) if v is not None}}
        handlers = {name: handler for name, value in given.items() if (handler := _handler_of(value)) is not None}
        object.__setattr__(self, "_handlers", handlers)
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)
        if model is None:
            self.model = None
        if optimizer is None:
            self.optimizer = None
        plain = {name: value for name, value in given.items() if name not in handlers}
        super().__init__(broadcast_object, basics.rank, **plain)

    _handlers: dict[str, StateHandler]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        object.__setattr__(self, name, value)

    def save(self) -> None:
        """Copy everything in memory: models and optimizers on their own devices, into the previous copies."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore what was saved last; gradients are cleared."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks, then save it; after an error, :meth:`restore` gives the last save."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()  # also saves everything

    def reset(self) -> None:
        """Assign the remaining samples to the workers of the new world."""
        for handler in self._handlers.values():
            handler.reset()

    def _agree(self, update: tuple[float, float, int]) -> tuple[float, float, int]:
        return agree_on_update(update)


def _handler_of(value: Any, containers: frozenset[int] = frozenset()) -> StateHandler | None:
    """The handler of an object, or of a container of such objects; None for a plain value.

    Args:
        value: a value of the state, or an entry of one.
        containers: the ids of those that it is in, because a container may contain itself.
    """
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    if has_state and not isinstance(value, type):
        return PacerStateHandler(value)
    if handlers := _handlers_in(value, containers):
        return ContainerStateHandler(value, handlers)
    return None


def _handlers_in(container: Any, containers: frozenset[int] = frozenset()) -> dict[Any, StateHandler]:
    """The handlers of entries of a list, tuple or dict, by index or key."""
    if not isinstance(container, (list, tuple, dict)) or id(container) in containers:
        return {}
    inside = containers | {id(container)}
    found = ((key, _handler_of(entry, inside)) for key, entry in _entries(container))
    return {key: handler for key, handler in found if handler is not None}


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)
