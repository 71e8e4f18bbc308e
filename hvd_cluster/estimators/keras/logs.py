"""Logs that Keras passes to callbacks: numbers, or arrays of one for each class.

``F1Score()`` gives such an array, for example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_cluster.estimators.keras.state import as_array
from hvd_cluster.estimators.run.world import Collectives


def values(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Each value as a float, or as an array if it has several elements."""
    arrays = {name: as_array(value) for name, value in (logs or {}).items()}
    return {name: float(value.reshape(())) if value.size == 1 else value for name, value in arrays.items()}


def spread(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Floats only: an array becomes ``name_0``, ``name_1``, ..., one per element."""
    found: dict[str, float] = {}
    for name, value in values(logs).items():
        if isinstance(value, float):
            found[name] = value
        else:
            found |= {f"{name}_{index}": float(one) for index, one in enumerate(value.reshape(-1))}
    return found


def means(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """The mean of each value over the ranks, weighted by their rows."""
    rows = sum(count for count, _ in parts)
    names = dict.fromkeys(name for _, numbers in parts for name in numbers)
    return {name: sum(count * numbers[name] for count, numbers in parts if count) / rows for name in names}


def over_all_rows(model: Any, hvd: Collectives, own: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's numbers; metrics whose states add up are of the rows of all ranks.

    The mean of the ranks' AUCs, for example, is not the AUC of all rows. Every rank takes part, and the metrics have
    the state of all rows afterwards.

    Args:
        model: has just computed ``own`` with its metrics; on a rank without rows their states are the initial ones.
        hvd: ``hvd_cluster.torch``.
        own: numbers by name; empty on a rank without rows.
    """
    before = values(model.get_metrics_result())
    variables = [variable for metric in _leaves(model.metrics) if _adds_up(metric) for variable in metric.variables]
    states = hvd.allgather_object([as_array(variable) for variable in variables], name="hvd_cluster.keras.metrics")
    if len({tuple(array.shape for array in state) for state in states}) == 1:
        for variable, parts in zip(variables, zip(*states, strict=True), strict=True):
            variable.assign(sum(parts).astype(parts[0].dtype))
    after = values(model.get_metrics_result())

    def is_of_metric(name: str, value: Any) -> bool:  # and not of the user's own step, with the same name
        return name in before and np.array_equal(before[name], value, equal_nan=True)

    return {name: after[name] if is_of_metric(name, value) else value for name, value in own.items()}


def _leaves(metrics: Sequence[Any]) -> list[Any]:
    """The metrics, taken out of the lists that ``compile`` makes of them."""
    return [
        leaf for metric in metrics for leaf in (_leaves(metric.metrics) if hasattr(metric, "metrics") else [metric])
    ]


def _adds_up(metric: Any) -> bool:
    """Whether the ranks' states sum to that of all rows, as for Keras's own metrics."""
    return type(metric).update_state.__module__.startswith("keras.") and all(
        getattr(variable, "aggregation", "sum") == "sum" for variable in metric.variables
    )


def part(numbers: Mapping[str, float]) -> dict[str, Any]:
    """The "train" or "validation" part of an epoch's record."""
    rest = {name: value for name, value in numbers.items() if name != "loss"}
    return {**({"loss": numbers["loss"]} if "loss" in numbers else {}), "all_metrics": [rest]}
