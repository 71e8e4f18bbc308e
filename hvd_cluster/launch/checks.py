"""Checks of arguments that several launchers share. Each returns the problems it found, a sentence each. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

#: Limits of the cooldown, in seconds.
_COOLDOWN_BOUNDS_S = (1.0, 3600.0)
_MAX_PORT = 65535


def num_proc_problems(num_proc: object, name: str = "num_proc") -> list[str]:
    """Problems of a number of workers; None means as many as fit."""
    if num_proc is None or (isinstance(num_proc, Integral) and int(num_proc) >= 1):
        return []
    return [f"{name}={num_proc!r} must be a whole number of at least 1: a job needs a worker"]


def num_proc_range_problems(given: Mapping[str, int | None]) -> list[str]:
    """Problems of the numbers of workers of an elastic job.

    Args:
        given: workers at the start, their minimum, their maximum, and how often they may change, in this order by the
            names of the arguments; None for no limit.
    """
    (name, num_proc), (min_name, min_num_proc), (max_name, max_num_proc), (reset_name, reset_limit) = given.items()
    counts = ((name, num_proc), (min_name, min_num_proc), (max_name, max_num_proc))
    if wrong := [
        problem for each, value in (*counts, (reset_name, reset_limit)) for problem in _type_problems(each, value)
    ]:
        return wrong
    problems = [f"{each}={value!r} must be at least 1" for each, value in counts if value is not None and value < 1]
    if num_proc is not None and min_num_proc is not None and min_num_proc > num_proc:
        problems.append(f"{min_name}={min_num_proc} is more than {name}={num_proc}")
    if num_proc is not None and max_num_proc is not None and max_num_proc < num_proc:
        problems.append(f"{max_name}={max_num_proc} is less than {name}={num_proc}")
    if num_proc is None and min_num_proc is not None and max_num_proc is not None and max_num_proc < min_num_proc:
        problems.append(f"{max_name}={max_num_proc} is less than {min_name}={min_num_proc}")
    if reset_limit is not None and reset_limit < 0:
        problems.append(f"{reset_name}={reset_limit} must be at least 0")
    return problems


def _type_problems(name: str, value: object) -> list[str]:
    is_count = value is None or (isinstance(value, Integral) and not isinstance(value, bool))
    return [] if is_count else [f"{name}={value!r} must be a whole number"]


def count_problems(name: str, value: Any) -> list[str]:
    """Problems of a value that must be a whole number of at least 1, or None."""
    return _type_problems(name, value) or (
        [] if value is None or value >= 1 else [f"{name}={value} must be at least 1"]
    )


def amount_problems(name: str, value: Any, unit: str = "") -> list[str]:
    """Problems of a value that must be a finite number of at least 0; ``unit`` is for example " of seconds"."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return [f"{name}={value!r} must be a number{unit}"]
    return [] if float(value) >= 0 else [f"{name}={value} must be >= 0"]


def cooldown_problems(name: str, pair: Any) -> list[str]:
    """Problems of the shortest and the longest time for which a failed host is not used; None is not checked."""
    if pair is None:
        return []
    if not isinstance(pair, Sequence) or len(pair) != 2 or any(amount_problems("", seconds) for seconds in pair):
        return [f"{name}={pair!r} must be two numbers of seconds: the shortest, the longest"]
    (low, high), (shortest, longest) = _COOLDOWN_BOUNDS_S, pair
    if low <= shortest <= longest <= high:
        return []
    return [f"{name} {shortest:g} {longest:g} must be two increasing numbers of seconds from {low:g} to {high:g}"]


def seconds_problems(given: Mapping[str, Any]) -> list[str]:
    """Problems of numbers of seconds, by the names of their arguments; None is not checked."""
    return [
        f"{name}={format(value, 'g') if isinstance(value, Real) else repr(value)} must be > 0 seconds"
        for name, value in given.items()
        if value is not None and (amount_problems("", value) or value == 0)
    ]


def interface_problems(nics: Any, name: str = "nics") -> list[str]:
    """Problems of the names of network interfaces."""
    if nics is None or isinstance(nics, Iterable):
        return []
    return [f"{name}={nics!r} must be the name of a network interface, or several"]


def string_problems(name: str, value: Any, what: str, *others: type) -> list[str]:
    """Problems of a value that must be a string, or of one of ``others``, with ``what`` in it; None is not checked."""
    return [] if value is None or isinstance(value, (str, *others)) else [f"{name}={value!r} must be a string: {what}"]


def port_problems(name: str, value: Any) -> list[str]:
    """Problems of the number of a port, which may be a string; None is not checked."""
    is_port = str(value).isdecimal() and 1 <= int(value) <= _MAX_PORT
    return [] if value is None or is_port else [f"{name}={value!r} must be the number of a port, 1 to {_MAX_PORT}"]


def flag_problems(name: str, value: Any) -> list[str]:
    """Problems of a value that must be True or False."""
    return [] if value in (True, False) else [f"{name}={value!r} must be True or False"]


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


def interface_names(nics: str | Iterable[str] | None) -> tuple[str, ...]:
    """The network interfaces in ``nics``: a name, several names, or one text with names separated by commas."""
    texts = [nics] if isinstance(nics, str) else list(nics or ())
    if isinstance(nics, (set, frozenset)):
        texts = sorted(texts)  # the same first interface on every host
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
