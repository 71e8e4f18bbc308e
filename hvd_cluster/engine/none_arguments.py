"""None for arguments of public functions, where Horovod's users mean "not given"."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def filler(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
    """A function that puts ``function``'s defaults in place of None in arguments."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default not in (None, each.empty)}
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]

    def given(name: str, value: Any) -> Any:
        return defaults.get(name) if value is None else value

    def filled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        named = {name: given(name, value) for name, value in kwargs.items()}
        return (*map(given, positional, args), *args[len(positional) :]), named

    return filled


def none_is_default(function: F) -> F:
    """Let None stand for the default of each parameter that has one."""
    filled = filler(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in args:  # not "None in": tensors compare element by element
            if value is None:
                break
        else:
            for value in kwargs.values():
                if value is None:
                    break
            else:
                return function(*args, **kwargs)
        args, kwargs = filled(args, kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
