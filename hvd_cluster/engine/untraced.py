"""``torch.compile`` and this package: code that communicates is not traced."""

from __future__ import annotations

import sys

import torch
from torch._compile import _disable_dynamo

_is_known = False


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
