"""Reads a checkpoint of Lightning as plain data, and runs no code in it.

Others may write to the folder of the file.
"""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import torch

from hvd_cluster.errors import DataError

#: The arguments of the module: training and scoring do not need them, and they may hold anything.
_HYPERPARAMETERS = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")


def plain_checkpoint(path: str | Path) -> dict[str, Any]:
    """The tensors, numbers, texts and containers of a checkpoint.

    Hyperparameters are left out. Classes that ``torch.serialization.add_safe_globals`` has registered are accepted too.

    Raises:
        DataError: the file holds something else; the text names it.
    """
    foreign = _foreign_names(path)
    stubs: list[Any] = [(_stub(name), name) for name in foreign]
    try:
        with torch.serialization.safe_globals(stubs) if stubs else contextlib.nullcontext():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise DataError(_refusal(path, str(error).strip().splitlines()[-1])) from error
    if not isinstance(content, dict):
        raise DataError(_refusal(path, f"it holds a {_name_of(content)}"))
    plain = {key: value for key, value in content.items() if key not in _HYPERPARAMETERS}
    for key, value in plain.items():
        if found := sorted(_foreign_in(value)):
            raise DataError(_refusal(path, f"{key!r} holds {', '.join(found)}"))
    return plain


def _foreign_names(path: str | Path) -> list[str]:
    """Full names of a file's classes and functions that are not plain data.

    Nothing is loaded.
    """
    look = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)  # from torch 2.6 on
    try:
        return list(look(path)) if look is not None else []
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError):
        return []  # loading the file reports what is wrong


class _Stub:
    """Takes the place of an object whose class is not loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


def _stub(name: str) -> type[_Stub]:
    return type(name, (_Stub,), {})


def _foreign_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {name for pair in value.items() for one in pair for name in _foreign_in(one)}
    if isinstance(value, (list, tuple, set)):
        return {name for one in value for name in _foreign_in(one)}
    is_stub = isinstance(value, _Stub) or (isinstance(value, type) and issubclass(value, _Stub))
    return {_name_of(value)} if is_stub else set()


def _name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _refusal(path: str | Path, reason: str) -> str:
    return (
        f"the checkpoint {path} is not loaded, because it is not plain data: {reason}. Return tensors, numbers and "
        "texts from state_dict() of callbacks and on_save_checkpoint(), or register a class that you trust with "
        "torch.serialization.add_safe_globals in the module that defines it"
    )
