"""Modules that have all their layers only after a hook of Lightning's: copies of them that hold the trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.torch.model_pickling import copied

#: What to call, in the Trainer's order: most modules need nothing, ``load_from_checkpoint`` calls the second alone.
_RECIPES: tuple[tuple[str, ...], ...] = ((), ("configure_model",), ("setup", "configure_model"))


def completed(module: torch.nn.Module, hooks: Sequence[str]) -> Any:
    """A copy of ``module`` on which ``hooks`` have been called."""
    whole: Any = copied(module)
    for hook in hooks:
        if hasattr(whole, hook):
            whole.setup(stage="fit") if hook == "setup" else getattr(whole, hook)()
    return whole


def with_configured_layers(module: torch.nn.Module) -> torch.nn.Module:
    """``module``, or a copy of it with what ``configure_model()`` makes where it has that hook.

    Raises:
        DataError: the hook fails, as it would for ``load_from_checkpoint``.
    """
    if not _brings(module, "configure_model"):
        return module
    try:
        whole: torch.nn.Module = completed(module, ["configure_model"])
    except Exception as error:  # the user's own hook
        raise DataError(
            f"the module's configure_model() failed without a Trainer: {type(error).__name__}: {error}. The fitted "
            "model calls it before it loads the weights, as load_from_checkpoint() does"
        ) from error
    return whole


def hooks_for(given: torch.nn.Module, whole: torch.nn.Module) -> tuple[str, ...]:
    """The hooks that make a module with the keys of ``whole`` of the ``given`` one.

    Raises:
        DataError: its ``setup()`` makes others without a Trainer; the text names keys in which they differ.
    """
    keys, differing = set(whole.state_dict()), set[str]()
    for hooks in _RECIPES:
        if not all(_brings(given, hook) for hook in hooks[:1]):
            continue
        try:
            found = set((completed(given, hooks) if hooks else given).state_dict())
        except Exception as error:  # the user's own hook, which may need the trainer
            failure = f"{hooks[0]}() failed without a Trainer: {type(error).__name__}: {error}"
            raise DataError(_refusal(differing, failure)) from error
        if found == keys:
            return hooks
        differing = found ^ keys
    if _brings(given, "setup"):
        raise DataError(_refusal(differing, "setup() makes others without a Trainer"))
    return ()  # callbacks may change keys for the time of the fit, as pruning does


def _brings(module: torch.nn.Module, hook: str) -> bool:
    """Whether a module's own class has a hook, not only Lightning's."""
    method = getattr(type(module), hook, None)
    return method is not None and not method.__module__.startswith(("lightning.", "pytorch_lightning."))


def _refusal(keys: set[str], reason: str) -> str:
    some = ", ".join(sorted(keys)[:5])
    return (
        f"the module that is trained has other weights than the one that was given ({some}), and the fitted model "
        f"cannot be made of them: {reason}. Make the layers in __init__() or in configure_model()"
    )
