"""``torch.compile`` and this package: what talks to the other ranks runs as it is written."""

from __future__ import annotations

import sys

import torch
from torch._compile import _disable_dynamo

_is_known = False


def keep_untraced() -> None:
    """Have Dynamo break the graph where this package is called, and trace nothing of it.

    It would trace into the engine, whose work is done by the thread that waits. The compiler is not loaded for that:
    until something else has loaded it, nothing is traced. ``torch.compiler.disable`` on each function would load it.
    """
    # Dynamo, should it have come here all the same, takes the second condition for True and the call for a graph break.
    if not _is_known and ("torch._dynamo" in sys.modules or torch.compiler.is_dynamo_compiling()):
        _register()


def _register_traced() -> None:
    global _is_known
    add = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if add is not None:
        add(__name__.partition(".")[0])
        _is_known = True


_register = _disable_dynamo(_register_traced)
