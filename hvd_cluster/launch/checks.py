"""Checks of arguments that several launchers share. Pure.

Each returns the problems it found, a sentence each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

#: Limits of the cooldown, in seconds.
_COOLDOWN_BOUNDS_S = (1.0, 3600.0)
_MAX_PORT = 65535


def whole_problems(name: str, value: Any, minimum: int | None = None) -> list[str]:
    """Problems of a value that must be a whole number, of at least ``minimum``."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if is_whole and (minimum is None or value >= minimum):
        return []
    return [f"{name}={value!r} must be a whole number{'' if minimum is None else f' of at least {minimum}'}"]


def count_problems(name: str, value: Any, minimum: int = 1) -> list[str]:
    """As :func:`whole_problems`; None is not checked."""
    return [] if value is None else whole_problems(name, value, minimum)


def verbosity_problems(name: str, value: Any) -> list[str]:
    """Problems of how much output is shown: 0, 1, 2, or Horovod's False and True."""
    return [] if isinstance(value, bool) else whole_problems(name, value, 0)


def num_proc_range_problems(given: Mapping[str, int | None]) -> list[str]:
    """Problems of the numbers of workers of an elastic job.

    Args:
        given: workers at the start, their minimum, their maximum, and how often they may change, in this order by the
            names of the arguments; None for no limit.
    """
    (name, num_proc), (min_name, min_num_proc), (max_name, max_num_proc), (reset_name, reset_limit) = given.items()
    problems = [text for each in (name, min_name, max_name) for text in count_problems(each, given[each])]
    if problems := problems + count_problems(reset_name, reset_limit, 0):
        return problems
    if num_proc is not None and min_num_proc is not None and min_num_proc > num_proc:
        problems.append(f"{min_name}={min_num_proc} is more than {name}={num_proc}")
    if num_proc is not None and max_num_proc is not None and max_num_proc < num_proc:
        problems.append(f"{max_name}={max_num_proc} is less than {name}={num_proc}")
    if num_proc is None and min_num_proc is not None and max_num_proc is not None and max_num_proc < min_num_proc:
        problems.append(f"{max_name}={max_num_proc} is less than {min_name}={min_num_proc}")
    return problems


def amount_problems(name: str, value: Any, unit: str = "") -> list[str]:
    """Problems of a value that must be a finite number of at least 0.

    ``unit`` is for example " of seconds".
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return [f"{name}={value!r} must be a number{unit}"]
    return [] if float(value) >= 0 else [f"{name}={value} must be >= 0"]


def cooldown_problems(name: str, pair: Any) -> list[str]:
    """Problems of the shortest and longest time without a failed host.

    None is not checked.
    """
    if pair is None:
        return []
    if not isinstance(pair, Sequence) or len(pair) != 2 or any(amount_problems("", seconds) for seconds in pair):
        return [f"{name}={pair!r} must be two numbers of seconds: the shortest, the longest"]
    (low, high), (shortest, longest) = _COOLDOWN_BOUNDS_S, pair
    if low <= shortest <= longest <= high:
        return []
    return [f"{name} {shortest:g} {longest:g} must be two increasing numbers of seconds from {low:g} to {high:g}"]


def seconds_problems(given: Mapping[str, Any]) -> list[str]:
    """Problems of numbers of seconds, by the names of their arguments.

    None is not checked.
    """
    return [
        f"{name}={format(value, 'g') if isinstance(value, float) else repr(value)} must be > 0 seconds"
        for name, value in given.items()
        if value is not None and (amount_problems("", value) or value == 0)
    ]


def interface_problems(nics: Any, name: str = "nics") -> list[str]:
    """Problems of the names of network interfaces."""
    if nics is None or isinstance(nics, Iterable):
        return []
    return [f"{name}={nics!r} must be the name of a network interface, or several"]


def string_problems(name: str, value: Any, what: str, *others: type) -> list[str]:
    """Problems of a value that must be a string with ``what`` in it.

    Or one of ``others``. None is not checked.
    """
    return [] if value is None or isinstance(value, (str, *others)) else [f"{name}={value!r} must be a string: {what}"]


def port_problems(name: str, value: Any) -> list[str]:
    """Problems of the number of a port, which may be a string; None is not checked."""
    is_port = str(value).isdecimal() and 1 <= int(value) <= _MAX_PORT
    return [] if value is None or is_port else [f"{name}={value!r} must be the number of a port, 1 to {_MAX_PORT}"]


def flag_problems(name: str, value: Any) -> list[str]:
    """Problems of a value that must be True or False; None is not checked."""
    return [] if value is None or value in (True, False) else [f"{name}={value!r} must be True or False"]


def controller_problems(use_gloo: bool | None, use_mpi: bool | None) -> list[str]:
    """Problems of Horovod's choice of a controller."""
    return ["use_gloo and use_mpi exclude each other: leave both out"] if use_gloo and use_mpi else []


def variable_problems(env: Mapping[str, Any] | None) -> list[str]:
    """Problems of environment variables for the workers."""
    given: Any = env
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return [f"variables for the workers must be a dict, such as {{'NCCL_DEBUG': 'INFO'}}, not {given!r}"]
    return [
        f"variables for the workers must have strings as names, such as 'NCCL_DEBUG', not {name!r}"
        for name in given
        if not isinstance(name, str)
    ] + [
        f"the variable {name}={value!r} for the workers must be a string, a number or a path, or None to remove it"
        for name, value in given.items()
        if not (value is None or isinstance(value, (str, Real, os.PathLike)))
    ]


def checked_variables(env: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Environment variables for workers as strings; None removes a variable.

    Args:
        env: values may be strings, numbers and paths: ``1`` becomes "1", ``True`` becomes "True".

    Raises:
        TypeError: it is not a dict of such values; the message lists all problems.
    """
    if problems := variable_problems(env):
        raise TypeError("; ".join(problems))
    return {
        name: None if value is None else os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        for name, value in (env or {}).items()
    }
