"""Whether an imported function uses objects that several threads would share.

A module may hold a tokenizer or a list, for example.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

_CONSTANTS = (str, bytes, int, float, complex, type(None), np.generic, np.dtype, torch.dtype, re.Pattern)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def uses_objects(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` may use an object that other threads can change.

    It may do so itself, or in code of its package that it uses. It is True in doubt. Functions and classes of other
    packages count as safe.
    """
    places = _places(fn)
    waiting: list[Any] = [fn]
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (tuple, frozenset)):
            waiting += value
        elif isinstance(value, (staticmethod, classmethod)):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset]
        elif isinstance(value, (types.FunctionType, type)):
            if value is fn or places & _places(value):
                waiting += _used_by_class(value) if isinstance(value, type) else _used_by(value)
        elif not _is_safe(value):
            return True
    return False


def _is_safe(value: Any) -> bool:
    """Whether several threads may use a value.

    It is neither a function of Python nor a class.
    """
    if inspect.isroutine(value):  # bound methods are routines too
        return isinstance(getattr(value, "__self__", None), (type(None), types.ModuleType, type))
    return isinstance(value, (*_CONSTANTS, *_DESCRIPTORS, np.ufunc, types.ModuleType))


def _used_by_class(cls: type) -> list[Any]:
    wanted = (types.FunctionType, staticmethod, classmethod)
    return [
        value for name, value in vars(cls).items() if isinstance(value, wanted) or not name.startswith("__")
    ] + list(cls.__bases__)


def _used_by(fn: types.FunctionType) -> list[Any]:
    """The values that a function can reach by names, defaults and closure.

    The names are those in its code.
    """
    names = frozenset(_names(fn.__code__))
    used = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), *map(_content, fn.__closure__ or ())]
    # Modules that the function imports itself are not among its globals.
    used += [fn.__globals__.get(name, sys.modules.get(name)) for name in names]
    return [*used, *_attributes(names, used)]


def _attributes(names: frozenset[str], values: Iterable[Any]) -> Iterator[Any]:
    """The attributes of these names of modules among the values.

    Also of modules among these.
    """
    waiting, seen = list(values), set()
    while waiting:
        module = waiting.pop()
        if isinstance(module, types.ModuleType) and module.__name__ not in seen:
            seen.add(module.__name__)
            found = [vars(module)[name] for name in names & vars(module).keys()]
            waiting += found
            yield from found


def _names(code: types.CodeType) -> Iterator[str]:
    """The names in a function's code, and in its lambdas and comprehensions."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _places(value: Any) -> set[str]:
    """The package that a function or class belongs to, and the folder of its module."""
    name = getattr(value, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    return {name.partition(".")[0]} | ({str(Path(file).parent)} if file else set())
