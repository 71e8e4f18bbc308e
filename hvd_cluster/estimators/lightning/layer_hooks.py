"""Copies of modules that have all their layers only after a hook of Lightning, such as ``configure_model()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.torch.model_pickling import copied

#: Hooks to call, in the Trainer's order: most modules need none, ``load_from_checkpoint`` calls ``configure_model``.
_HOOKS: tuple[tuple[str, ...], ...] = ((), ("configure_model",), ("setup", "configure_model"))


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
    """``module``, or a copy with the layers of its ``configure_model()`` if it has that hook.

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


def hooks_for(given: torch.nn.Module, whole: torch.nn.Module) -> tuple[str, ...]:
    """The hooks after which the ``given`` module has the keys of ``whole``.

    Raises:
        DataError: without a Trainer, ``setup()`` makes other layers; the text names keys that differ.
    """
    keys, differing = set(whole.state_dict()), set[str]()
    for hooks in _HOOKS:
        if not all(_defines(given, hook) for hook in hooks[:1]):
            continue
        try:
            found = set((after_hooks(given, hooks) if hooks else given).state_dict())
        except Exception as error:  # the user's own hook, which may need the trainer
            failure = f"{hooks[0]}() failed without a Trainer: {type(error).__name__}: {error}"
            raise DataError(_refusal(differing, failure)) from error
        if found == keys:
            return hooks
        differing = found ^ keys
    if _defines(given, "setup"):
        raise DataError(_refusal(differing, "setup() makes other ones without a Trainer"))
    return ()  # callbacks may change keys during the fit, as pruning does


def _defines(module: torch.nn.Module, hook: str) -> bool:
    """Whether the user's class defines a hook, and not only Lightning."""
    method = getattr(type(module), hook, None)
    return method is not None and not method.__module__.startswith(("lightning.", "pytorch_lightning."))


def _refusal(keys: set[str], reason: str) -> str:
    some = ", ".join(sorted(keys)[:5])
    return (
        f"the trained module has other weights than the given one ({some}), so the fitted model cannot be made: "
        f"{reason}. Make the layers in __init__() or in configure_model()"
    )
