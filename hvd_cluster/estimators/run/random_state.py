"""A process's random generators: seeded by epoch, saved within one, set aside."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

#: All threads share the generators, and several fits may begin at once.
_lock = threading.RLock()


def seed_all(seed: int, epoch: int, rank: int) -> None:
    """Seed torch, NumPy and Python for an epoch of a rank, the same in a resumed run."""
    number = (seed * 1_000_003 + epoch * 10_007 + rank) % 2**63
    with _lock:
        torch.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)


def capture() -> dict[str, Any]:
    """The state of all generators, as tensors, numbers and texts.

    NumPy's bit generator may be another one than the default, if it is NumPy's own.
    """
    found = _states()
    version, words, gauss = found["python"]
    return {
        **found,
        "numpy": json.dumps(found["numpy"], default=lambda value: value.tolist()),
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
    }


def restore(state: dict[str, Any]) -> None:
    """Restore what :func:`capture` returned."""
    version, words, gauss = state["python"]
    _set({**state, "numpy": json.loads(state["numpy"]), "python": (version, tuple(words.tolist()), gauss)})


def _states() -> dict[str, Any]:
    with _lock:
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
        }


def _set(state: dict[str, Any]) -> None:
    with _lock:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["cuda"])
        name = state["numpy"]["bit_generator"]
        if name != np.random.get_state(legacy=False)["bit_generator"]:
            np.random.mtrand.set_bit_generator(getattr(np.random, name)())
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


@contextlib.contextmanager
def set_aside(seed: int | None = None, rank: int = 0, own: dict[str, Any] | None = None) -> Iterator[None]:
    """Let generators continue after the block as before it.

    Other threads that call these functions wait for the block's end.

    Args:
        seed: in the block the generators give the same numbers in every process with this seed and ``rank``.
        rank: by default the same for all ranks.
        own: keeps the state at the end of the block, with which the next one begins instead; empty for the first.
    """
    with _lock:
        before = _states()
        if own:
            _set(own)
        elif seed is not None:
            seed_all(seed, -1, rank)  # before the first epoch
        try:
            yield
        finally:
            if own is not None:
                own.update(_states())
            _set(before)
