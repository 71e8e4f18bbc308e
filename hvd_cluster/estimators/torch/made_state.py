"""The part of a module's state that its factory does not make.

It consists of trainable parameters, and of what has changed. Only this part is sent, and stored in checkpoints, results
and saved models. Whether a tensor belongs to it is decided by its values, so that a parameter which is frozen and
changed nevertheless (the moving average of another) is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.torch.model_pickling import with_versions

#: Between the dtype and shape of a tensor and the hash of its values.
_MARK = " #"
_NUM_SUMS = 1024


def contents(model: torch.nn.Module) -> dict[str, str]:
    """Each entry of the state dict: its dtype and shape, and the hash of its values.

    Trainable parameters come without the hash.
    """
    trainable = _trainable(model)
    return {name: described(value, name not in trainable) for name, value in model.state_dict().items()}


def first_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs first between two :func:`contents`, in words; empty if nothing."""
    for name in (*before, *(name for name in now if name not in before)):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if new is None:
            return f"{name!r} is missing"
        if old is None:
            return f"{name!r} is new"
        if _shape(old) != _shape(new):
            return f"{name!r} is {_shape(new)}, and was {_shape(old)}"
        if (_MARK in old) != (_MARK in new):
            now_is, was = ("frozen", "trainable") if _MARK in new else ("trainable", "frozen")
            return f"{name!r} is {now_is}, and was {was}"
        return f"{name!r} ({_shape(new)}) has other values"
    return ""


def equal_names(made: Mapping[str, str]) -> set[str]:
    """The entries that every call of the factory gives the same values."""
    return {name for name, text in made.items() if _MARK in text}


def trained_part(model: torch.nn.Module, made: Mapping[str, str]) -> dict[str, Any] | None:
    """The entries of the state dict whose values are not those of the factory.

    None if the module has other entries, or other shapes, than what the factory makes.
    """
    state = model.state_dict()
    now = {name: described(value, _MARK in made.get(name, "")) for name, value in state.items()}
    if not same_shapes(now, made):
        return None
    changed = changed_names(now, made)
    return with_versions({name: value for name, value in state.items() if name in changed}, state)


def same_shapes(now: Mapping[str, str], made: Mapping[str, str]) -> bool:
    """Whether two :func:`contents` have the same entries, whatever their values."""
    return {name: _shape(text) for name, text in now.items()} == {name: _shape(text) for name, text in made.items()}


def changed_names(now: Mapping[str, str], made: Mapping[str, str]) -> set[str]:
    """The entries that need not have the values of the factory."""
    return {name for name, text in now.items() if _MARK not in text or text != made.get(name)}


def require_same(state: Mapping[str, Any], made: Mapping[str, str], run_id: str) -> None:
    """Check that the state of a checkpoint is of what the factory makes now.

    Raises:
        DataError: it is not; the text names the first tensor that differs.
    """
    if "made" in state and (difference := first_difference(state["made"], made)):
        raise DataError(
            f"run_id={run_id!r} has a checkpoint of another model than the factory makes now: {difference}. Choose "
            "another run_id, or make the model as before, with the same random_seed"
        )


def load(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a part of a state into a module that the factory has made.

    Raises:
        RuntimeError: it lacks a trainable parameter, or has entries that the module has not.
    """
    trainable = _trainable(model)
    found = model.load_state_dict(state, strict=False)
    missing = [name for name in found.missing_keys if name in trainable]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"missing: {missing or 'none'}, unexpected: {found.unexpected_keys or 'none'}")


class TrainedPart:
    """Repeated :func:`trained_part` of a module in training; hashes only changes.

    Args:
        made: the :func:`contents` of what the factory has made.
    """

    def __init__(self, made: Mapping[str, str]) -> None:
        self.made = made
        #: Entries that have had other values.
        self._changed: set[str] = set()
        #: The sums of each entry that had the factory's values. Neither torch's count of changes nor the address would
        #: do: what ``.data`` and batch_norm write is not counted.
        self._sums: dict[str, torch.Tensor] = {}

    def of(self, model: torch.nn.Module) -> dict[str, Any]:
        self._changed |= _trainable(model)
        state = model.state_dict()
        return with_versions({name: each for name, each in state.items() if self._has_changed(name, each)}, state)

    def _has_changed(self, name: str, value: Any) -> bool:
        if name in self._changed or not isinstance(value, torch.Tensor):
            return True
        sums, before = _sums(value), self._sums.get(name)
        if before is not None and torch.equal(sums, before.to(sums.device)):
            return False
        if described(value, True) != self.made.get(name):
            self._changed.add(name)
            return True
        self._sums[name] = sums
        return False


def _trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}


def described(value: Any, hashed: bool) -> str:
    """The text of one entry of :func:`contents`."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__  # the extra state of a module
    shape = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{shape}{_MARK}{_hash(value)}" if hashed else shape


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(_bytes(tensor).cpu().numpy().data, digest_size=16).hexdigest()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """What changes with a tensor's values, computed on its device.

    It is several times as fast as the hash. The result is integers of 64 bits, each the sum of every 1024th number of
    the memory; only exchanged numbers that are so far apart leave it as it is.
    """
    words = _bytes(tensor)
    if words.numel() % 8 == 0 and words.storage_offset() % 8 == 0:
        words = words.view(torch.int64)
    whole = words.numel() // _NUM_SUMS * _NUM_SUMS
    return torch.cat([words[:whole].view(-1, _NUM_SUMS).sum(0), words[whole:].long()])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _shape(text: str) -> str:
    return text.partition(_MARK)[0]
