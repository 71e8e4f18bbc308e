"""Collectives in compiled steps.

torch.compile does not trace them, and TensorFlow and JAX pass on their errors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._compile import _disable_dynamo

from hvd_cluster.errors import HorovodInternalError

_is_known = False
#: The last error that a collective has raised in a callback of a compiled step.
_kept: list[HorovodInternalError] = []


def keep_untraced() -> None:
    """Make Dynamo break the graph at calls of this package instead of tracing them.

    Otherwise it would trace into the engine, which the waiting thread advances. This does not load the compiler:
    nothing is traced until something else has loaded it. ``torch.compiler.disable`` on each function would load it.
    """
    # If Dynamo traces this function, the second condition is True and the call breaks the graph.
    if not _is_known and ("torch._dynamo" in sys.modules or torch.compiler.is_dynamo_compiling()):
        _register()


def _register_traced() -> None:
    global _is_known
    add = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if add is not None:
        add(__name__.partition(".")[0])
        _is_known = True


_register = _disable_dynamo(_register_traced)


@contextmanager
def keep_error() -> Iterator[None]:
    """Keep the error that a collective raises inside, for :func:`take_kept_error`.

    For callbacks of compiled steps in TensorFlow or JAX, whose runtimes pass on only the text of an error.
    """
    try:
        yield
    except HorovodInternalError as error:
        _kept[:] = [error.with_traceback(None)]
        raise


def take_kept_error() -> HorovodInternalError | None:
    """The error of a collective in a compiled step since the last call, or None."""
    return _kept.pop() if _kept else None
