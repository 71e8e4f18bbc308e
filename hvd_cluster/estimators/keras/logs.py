"""The numbers that Keras tells callbacks: most are single ones, some are arrays, as ``F1Score()``'s, one of a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_cluster.estimators.keras.state import as_array


def values(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Each one as a float, or as an array where it is one."""
    arrays = {name: as_array(value) for name, value in (logs or {}).items()}
    return {name: float(value.reshape(())) if value.size == 1 else value for name, value in arrays.items()}


def spread(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Floats alone: an array is one for each of its elements, ``name_0``, ``name_1``, ..."""
    found: dict[str, float] = {}
    for name, value in values(logs).items():
        if isinstance(value, float):
            found[name] = value
        else:
            found |= {f"{name}_{index}": float(one) for index, one in enumerate(value.reshape(-1))}
    return found


def means(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Means of each value over the ranks, each weighted by its rows."""
    rows = sum(count for count, _ in parts)
    names = dict.fromkeys(name for _, numbers in parts for name in numbers)
    return {name: sum(count * numbers[name] for count, numbers in parts if count) / rows for name in names}


def part(numbers: Mapping[str, float]) -> dict[str, Any]:
    """The "train" or "validation" part of an epoch's record."""
    rest = {name: value for name, value in numbers.items() if name != "loss"}
    return {**({"loss": numbers["loss"]} if "loss" in numbers else {}), "all_metrics": [rest]}
