"""Conventions for arguments that every launcher follows."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def none_is_default(fn: Callable[P, R]) -> Callable[P, R]:
    """Let None mean "not given" for each argument of ``fn`` that has another default, as in Horovod's functions."""
    parameters = inspect.signature(fn).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default not in (None, p.empty)}
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        named = [defaults.get(name) if value is None else value for name, value in zip(names, args, strict=False)]
        kwargs = {name: defaults.get(name) if value is None else value for name, value in kwargs.items()}
        return fn(*named, *args[len(names) :], **kwargs)  # type: ignore[arg-type]

    return wrapper


def fields_of(cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of a function, as ``locals()`` returns them, that are fields of the dataclass ``cls``."""
    return {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}


def renamed(old: str, given: Any, new: str, value: Any) -> Any:
    """The value of an argument that may be given under its old name; for :func:`none_is_default` functions."""
    if given is None:
        return value
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=4)
    return given
