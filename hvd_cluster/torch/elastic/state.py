"""The state of torch training: models, optimizers, schedulers, samplers, values."""

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
from hvd_cluster.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_cluster.torch.wrapper import load_unchanged


class StateHandler:
    """How one kind of object is saved, restored and synchronized between ranks."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Copy the object's state dict, reusing the memory of the previous copy."""
        self._saved = copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        """Load what was saved last."""
        self.value.load_state_dict(copied(self._saved))

    def sync(self) -> None:
        """Load rank 0's state.

        Do not save it here: the state saves all objects when it has received all of them.
        """
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
    """A scheduler, GradScaler or other object with a state dict; not copied itself.

    A copy of it would act on a copy of the optimizer.
    """

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class SamplerStateHandler(PacerStateHandler):
    """An :class:`~hvd_cluster.torch.elastic.sampler.ElasticSampler`."""

    def reset(self) -> None:
        self.value.reset()


class ContainerStateHandler(StateHandler):
    """A list, tuple or dict of objects with handlers, and of plain values.

    The two optimizers of a GAN are an example. Entries may be added and removed: each save and each sync takes the
    container as it is then.
    """

    def __init__(self, value: Any, handlers: dict[Any, StateHandler], containers: frozenset[int]) -> None:
        self.value = value
        #: Of the entries that were saved last, by index or key.
        self._handlers = handlers
        #: The ids of the containers that this one is in.
        self._containers = containers
        self._keep()

    def save(self) -> None:
        self._handlers = self._found()
        for handler in self._handlers.values():
            handler.save()
        self._keep()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        plain = copied_value(self._saved)
        self._fill([(key, self._handlers[key].value if key in self._handlers else plain[key]) for key in self._keys])

    def sync(self) -> None:
        shared = _sync_shared(self.value, self._found())
        if isinstance(self.value, tuple):
            return
        own = {_token(key, place): (key, entry) for place, (key, entry) in enumerate(_entries(self.value))}
        entries = broadcast_object({token: None if token in shared else entry for token, entry in own.items()})
        self._fill([entry or own[token] for token, entry in entries.items()])

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def set_value(self, value: Any) -> None:
        self.value, self._handlers = value, _handlers_in(value, {}, self._containers)
        self._keep()

    def _found(self) -> dict[Any, StateHandler]:
        return _handlers_in(self.value, self._handlers, self._containers)

    def _keep(self) -> None:
        """Keep the order of entries, and copies of those without handlers.

        A tuple keeps its own.
        """
        entries = [] if isinstance(self.value, tuple) else list(_entries(self.value))
        self._keys = [key for key, _ in entries]
        self._saved = copied_value({key: entry for key, entry in entries if key not in self._handlers})

    def _fill(self, entries: list[tuple[Any, Any]]) -> None:
        """Make these, by index or key, the entries of a list or dict."""
        if isinstance(self.value, list):
            self.value[:] = [entry for _, entry in entries]
        elif isinstance(self.value, dict):
            self.value.clear()
            for key, entry in entries:
                self.value[key] = entry


def _has_extra_state(module: torch.nn.Module) -> bool:
    """Whether the module saves and loads more than tensors.

    It does so by methods that ``torch.nn.Module`` only declares.
    """
    kind, base = type(module), torch.nn.Module
    return kind.get_extra_state is not base.get_extra_state and kind.set_extra_state is not base.set_extra_state


#: Classes of values that contain no objects with handlers, so that long lists of them are looked through fast.
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Tensor})

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
            batch=0``. A list or dict may get its first object later.
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
        handler = self._handlers.get(name)
        if handler is not None and handler.value is not value:  # state.nets += [net] assigns the same list
            handler.set_value(value)
        object.__setattr__(self, name, value)

    def save(self) -> None:
        """Copy everything in memory, into the previous copies.

        The copies of models and optimizers are on these objects' own devices.
        """
        now = self._now()
        handlers = self._found(now)
        plain = {name: copied_value(value) for name, value in now.items() if name not in handlers}
        for handler in handlers.values():
            handler.save()
        self._handlers, self._saved_state = handlers, plain

    def restore(self) -> None:
        """Restore what was saved last; gradients are cleared."""
        for name, handler in self._handlers.items():
            handler.restore()
            object.__setattr__(self, name, handler.value)
        super().restore()

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks, then save it.

        After an error, :meth:`restore` gives the last save.

        Raises:
            ValueError: another rank does not have an optimizer or a scheduler of rank 0, or not at the same place.
        """
        now = self._now()
        shared = _sync_shared(now, self._found(now))
        if plain := {name: value for name, value in now.items() if name not in shared}:
            for name, value in broadcast_object(plain).items():
                object.__setattr__(self, name, value)
        self.save()

    def reset(self) -> None:
        """Assign the remaining samples to the workers of the new world."""
        for handler in self._handlers.values():
            handler.reset()

    def _now(self) -> dict[str, Any]:
        """The attributes of the state, with and without handlers."""
        return {name: getattr(self, name) for name in (*self._handlers, *self._saved_state)}

    def _found(self, now: dict[str, Any]) -> dict[str, StateHandler]:
        """The handlers of the attributes.

        A list may contain its first optimizer since the last save.
        """
        found = ((name, _handler_of(value, self._handlers.get(name))) for name, value in now.items())
        return {name: handler for name, handler in found if handler is not None}

    def _agree(self, update: tuple[float, float, int]) -> tuple[float, float, int]:
        return agree_on_update(update)


def _handler_of(
    value: Any, known: StateHandler | None = None, containers: frozenset[int] = frozenset()
) -> StateHandler | None:
    """The handler of an object or of a container of such; None for a plain value.

    Args:
        value: a value of the state, or an entry of one.
        known: what handled the value at its place before; kept if that is still the same.
        containers: the ids of those that it is in, because a container may contain itself.
    """
    if type(value) in _PLAIN:
        return None
    if known is not None and known.value is value:
        return known
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    if has_state and not isinstance(value, type):
        return PacerStateHandler(value)
    if handlers := _handlers_in(value, {}, containers):
        return ContainerStateHandler(value, handlers, containers)
    return None


def _handlers_in(container: Any, known: dict[Any, StateHandler], containers: frozenset[int]) -> dict[Any, StateHandler]:
    """The handlers of a container's entries, by index or key.

    They are the known ones of the same objects, or new.
    """
    if not isinstance(container, (list, tuple, dict)) or id(container) in containers:
        return {}
    inside = containers | {id(container)}
    found = ((key, _handler_of(entry, known.get(key), inside)) for key, entry in _entries(container))
    return {key: handler for key, handler in found if handler is not None}


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _token(key: Any, place: int) -> Any:
    """What stands for an entry on all ranks: its key, or its place.

    It is the place if a pickled copy may not equal the key.
    """
    return key if isinstance(key, (str, int)) else ("place", place)


def _sync_shared(container: Any, handlers: dict[Any, StateHandler]) -> set[Any]:
    """Synchronize entries with one kind of handler on all ranks; return their tokens.

    A rank that does not have an object, such as a new worker without what the others have added, gets a copy of rank
    0's, as of a plain value. That is right for a module, but a copy of an optimizer acts on copies of the weights.

    Raises:
        ValueError: a rank does not have an optimizer or a scheduler of rank 0; raised on all ranks.
    """
    own: dict[Any, StateHandler] = {}
    described: dict[Any, tuple[str, str]] = {}
    for place, (key, entry) in enumerate(_entries(container)):
        if (handler := handlers.get(key)) is not None:
            own[_token(key, place)] = handler
            described[_token(key, place)] = (type(handler).__name__, _acting_in(entry))
    everywhere = allgather_object(described)
    shared = set()
    for token, (kind, acting) in everywhere[0].items():
        lacking = [rank for rank, found in enumerate(everywhere) if found.get(token, ("", ""))[0] != kind]
        if not lacking:
            shared.add(token)
        elif acting:
            raise ValueError(
                f"the state of rank 0 has a {acting} at {token!r}, and rank {lacking[0]} does not: create the same "
                "optimizers and schedulers on all ranks, and put them into the state, before the state is synchronized"
            )
    for token in everywhere[0]:
        if token in shared:
            own[token].sync()
    return shared


def _acting_in(value: Any, containers: frozenset[int] = frozenset()) -> str:
    """The class of an optimizer or a scheduler in a value, or nothing.

    Such an object acts on others.
    """
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return type(value).__name__
    if not isinstance(value, (list, tuple, dict)) or id(value) in containers:
        return ""
    inside = containers | {id(value)}
    return next((found for _, entry in _entries(value) if (found := _acting_in(entry, inside))), "")
