"""Checks of arguments that several launchers share. Each returns the problems it found, a sentence each. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any


def num_proc_problems(num_proc: object) -> list[str]:
    """Problems of a number of workers; None means as many as fit."""
    if num_proc is None or (isinstance(num_proc, Integral) and int(num_proc) >= 1):
        return []
    return [f"num_proc={num_proc!r} must be a whole number of at least 1: a job needs a worker"]


def num_proc_range_problems(
    num_proc: int | None,
    min_num_proc: int | None,
    max_num_proc: int | None,
    reset_limit: int | None,
    names: tuple[str, str, str, str] = ("num_proc", "min_num_proc", "max_num_proc", "reset_limit"),
) -> list[str]:
    """Problems of the numbers of workers of an elastic job.

    Args:
        num_proc: workers at the start.
        min_num_proc: the minimum; ``num_proc`` if None.
        max_num_proc: the maximum; None for no limit.
        reset_limit: how often the workers may change; None for no limit.
        names: what the user calls these arguments.
    """
    name, min_name, max_name, reset_name = names
    given = ((name, num_proc), (min_name, min_num_proc), (max_name, max_num_proc))
    problems = [f"{each}={value!r} must be at least 1" for each, value in given if value is not None and value < 1]
    if num_proc is not None and min_num_proc is not None and min_num_proc > num_proc:
        problems.append(f"{min_name}={min_num_proc} is more than {name}={num_proc}")
    if num_proc is not None and max_num_proc is not None and max_num_proc < num_proc:
        problems.append(f"{max_name}={max_num_proc} is less than {name}={num_proc}")
    if num_proc is None and min_num_proc is not None and max_num_proc is not None and max_num_proc < min_num_proc:
        problems.append(f"{max_name}={max_num_proc} is less than {min_name}={min_num_proc}")
    if reset_limit is not None and reset_limit < 0:
        problems.append(f"{reset_name}={reset_limit} must be at least 0")
    return problems


def count_problems(name: str, value: Any) -> list[str]:
    """Problems of a value that must be a whole number of at least 1, or None."""
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, Integral):
        return [f"{name}={value!r} must be a whole number"]
    return [] if int(value) >= 1 else [f"{name}={value} must be >= 1"]


def amount_problems(name: str, value: Any, unit: str = "") -> list[str]:
    """Problems of a value that must be a finite number of at least 0; ``unit`` is for example " of seconds"."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return [f"{name}={value!r} must be a number{unit}"]
    return [] if float(value) >= 0 else [f"{name}={value} must be >= 0"]


def seconds_problems(**given: float | None) -> list[str]:
    """Problems of numbers of seconds, by the names of their arguments; None is not checked."""
    return [
        f"{name}={value!r} must be more than 0 seconds"
        for name, value in given.items()
        if value is not None and not value > 0
    ]


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
        f"variables for the workers must have texts as names, such as 'NCCL_DEBUG', not {name!r}"
        for name in given
        if not isinstance(name, str)
    ] + [
        f"the variable {name}={value!r} for the workers must be a text, a number or a path, or None to remove it"
        for name, value in given.items()
        if not (value is None or isinstance(value, (str, Real, os.PathLike)))
    ]


def checked_variables(env: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Environment variables for workers as texts; None removes a variable.

    Args:
        env: values may be texts, numbers and paths: ``1`` becomes "1", ``True`` becomes "True".

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
