"""The rules for arguments that every launcher has, with one text each."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def none_is_default(fn: Callable[P, R]) -> Callable[P, R]:
    """Let None stand for "not given" in each argument of ``fn`` that has another default, as in Horovod's functions."""
    parameters = inspect.signature(fn).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default not in (None, p.empty)}
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        named = [defaults.get(name) if value is None else value for name, value in zip(names, args, strict=False)]
        kwargs = {name: defaults.get(name) if value is None else value for name, value in kwargs.items()}
        return fn(*named, *args[len(names) :], **kwargs)  # type: ignore[arg-type]

    return wrapper


def wrong_num_proc(num_proc: object) -> list[str]:
    """What is wrong with a number of workers: nothing, or one sentence. None stands for "as many as there is room"."""
    if num_proc is None or (isinstance(num_proc, Integral) and int(num_proc) >= 1):
        return []
    return [f"num_proc={num_proc!r} must be a whole number of at least 1: a job needs a worker"]


def wrong_controllers(use_gloo: bool | None, use_mpi: bool | None) -> list[str]:
    """What is wrong with Horovod's choice of a controller: nothing, or one sentence."""
    if use_gloo and use_mpi:
        return ["use_gloo and use_mpi exclude each other: leave both out"]
    return []


def warn_of_mpi(use_mpi: bool | None) -> None:
    """Say that ``use_mpi=True`` changes nothing."""
    if use_mpi:
        logger.warning("use_mpi=True has no effect: MPI is not used, there is one rendezvous, our own")


def renamed(old: str, given: Any, new: str, value: Any) -> Any:
    """The value of an argument of a :func:`none_is_default` function that may have come under its old name."""
    if given is None:
        return value
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=4)
    return given
