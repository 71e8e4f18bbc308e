"""None for arguments of public functions, where Horovod's users mean "not given"."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def none_is_default(function: F) -> F:
    """Let None stand for the default of each parameter that has one."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default not in (None, each.empty)}
    positions = [each.name for each in parameters]

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
        for index, value in enumerate(args):
            if value is None and positions[min(index, len(positions) - 1)] in defaults:
                named = zip(positions, args, strict=False)
                args = tuple(defaults.get(name) if one is None else one for name, one in named) + args[len(positions) :]
                break
        for name, value in kwargs.items():
            if value is None and name in defaults:
                kwargs[name] = defaults[name]
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
