"""The numbers that a module logs, by the epoch in which it logs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EpochNumbers:
    """Which numbers were logged in the current epoch.

    Lightning keeps each number for callbacks until it is logged again. Numbers that callbacks put into
    ``trainer.callback_metrics`` themselves belong to every epoch.
    """

    def __init__(self) -> None:
        #: Whether a validation has ended in the epoch.
        self.is_validated = False
        #: Names of numbers that have been logged, and those among them that have been in this epoch.
        self._known: set[str] = set()
        self._current: set[str] = set()

    def begin(self) -> None:
        """A new epoch begins."""
        self.is_validated = False
        self._current = set()

    def add(self, results: Any) -> None:
        """Note what a loop of the Trainer has logged since it was reset.

        Args:
            results: the ``_ResultCollection`` of the loop.
        """
        logged = [result for result in results.values() if not result.has_reset]
        names = {name for result in logged for step in (True, False) for name in results._forked_name(result, step)}
        self._known |= names
        self._current |= names

    def of_epoch(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        """What ``trainer.callback_metrics`` has of this epoch."""
        earlier = self._known - self._current
        return {name: float(value) for name, value in numbers.items() if name not in earlier}

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes, as plain values."""
        return {"is_validated": self.is_validated, "known": sorted(self._known), "current": sorted(self._current)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue an interrupted epoch."""
        self.is_validated = state["is_validated"]
        self._known, self._current = set(state["known"]), set(state["current"])


def parted(logged: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """What a module logged, as the "train" and the "validation" part of a record.

    Names that begin with ``val`` belong to the validation; ``train_``, ``val_`` and ``validation_`` are removed.
    """
    parts: dict[str, dict[str, Any]] = {"train": {"all_metrics": [{}]}, "validation": {"all_metrics": [{}]}}
    for name, value in logged.items():
        prefix, found, rest = name.replace("/", "_").partition("_")
        part = "validation" if prefix in ("val", "valid", "validation") else "train"
        short = rest if found and prefix in ("train", "val", "valid", "validation") else name
        if short == "loss":
            parts[part]["loss"] = value
        else:
            parts[part]["all_metrics"][0][short] = value
    return parts
