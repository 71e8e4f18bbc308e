"""Copies of modules whose layers are complete only after a hook of Lightning.

``configure_model()`` is such a hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.torch.changed_module import layout
from hvd_cluster.estimators.torch.model_pickling import copied

#: Hooks to call, in the Trainer's order; ``load_from_checkpoint`` calls the first only.
_HOOKS: tuple[tuple[str, ...], ...] = (("configure_model",), ("setup", "configure_model"))


def after_hooks(module: torch.nn.Module, hooks: Sequence[str]) -> Any:
    """A copy of ``module`` on which ``hooks`` have been called."""
    return with_hooks_called(copied(module), hooks)


def with_hooks_called(module: Any, hooks: Sequence[str]) -> Any:
    """``module`` itself, after the call of its ``hooks``."""
    for hook in hooks:
        if hasattr(module, hook):
            module.setup(stage="fit") if hook == "setup" else getattr(module, hook)()
    return module


def with_configured_layers(module: torch.nn.Module) -> torch.nn.Module:
    """``module``, or a copy with the layers of its ``configure_model()``, if any.

    Raises:
        DataError: the hook fails, as it would for ``load_from_checkpoint``.
    """
    if not _defines(module, "configure_model"):
        return module
    try:
        whole: torch.nn.Module = after_hooks(module, ["configure_model"])
    except Exception as error:  # the user's own hook
        raise DataError(
            f"the module's configure_model() failed without a Trainer: {type(error).__name__}: {error}. The fitted "
            "model calls it before it loads the weights, as load_from_checkpoint() does"
        ) from error
    return whole


def makes_layers(module: torch.nn.Module) -> bool:
    """Whether the user's class defines a hook that may make layers."""
    return _defines(module, "setup") or _defines(module, "configure_model")


def hooks_for(given: torch.nn.Module, whole: torch.nn.Module) -> tuple[str, ...] | None:
    """The hooks that give ``given`` the entries of ``whole``; None if it needs more."""
    wanted = layout(whole)
    for hooks in _HOOKS:
        with contextlib.suppress(Exception):  # the user's own hook, which may need the trainer
            if _defines(given, hooks[0]) and layout(after_hooks(given, hooks)) == wanted:
                return hooks
    return None


def _defines(module: torch.nn.Module, hook: str) -> bool:
    """Whether the user's class defines a hook, and not only Lightning."""
    method = getattr(type(module), hook, None)
    return method is not None and not method.__module__.startswith(("lightning.", "pytorch_lightning."))
