"""Rules for params: each returns the final form of a value, or raises ValueError.

The text of the error completes "<param>=<value> ...". Stages hold the rules, so these can be pickled.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

Rule = Callable[[Any], Any]


def anything(value: Any) -> Any:
    return value


def whole(at_least: int) -> Rule:
    """An integer (Python's or numpy's) of at least ``at_least``."""
    return functools.partial(_whole, at_least)


def _whole(at_least: int, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError("must be a whole number") from None
    if isinstance(value, bool) or number < at_least:
        raise ValueError(f"must be a whole number of at least {at_least}")
    return number


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    return value


def column_names(value: Any) -> list[str]:
    """Distinct column names, from a list, index or array; one name is a list of one."""
    if hasattr(value, "tolist"):  # pandas or NumPy, as in df.columns.drop("y")
        value = value.tolist()
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be a non-empty list of column names")
    if len(set(names)) < len(names):
        raise ValueError("names a column twice")
    return names


def items(value: Any) -> list[Any]:
    """A list of anything; tuples become lists."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list")
    return list(value)


def numbers(value: Any) -> list[float]:
    try:
        return [float(item) for item in items(value)]
    except TypeError:
        raise ValueError("must be a list of numbers") from None


def shapes(value: Any) -> list[list[int]]:
    """A list of shapes, each a list of whole numbers with at most one -1."""
    found = []
    for shape in items(value):
        sizes = [operator.index(size) for size in shape] if isinstance(shape, (list, tuple)) else []
        if not sizes or sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
            raise ValueError("must be a list of shapes such as [[-1, 1, 28, 28]], where -1 is the batch")
        found.append(sizes)
    return found


def share_or_column(value: Any) -> float | str:
    """A share of rows in [0, 1), or the name of a column that marks validation rows."""
    if isinstance(value, str) and value:
        return value
    if type(value) is not bool and isinstance(value, Real) and 0 <= float(value) < 1:
        return float(value)
    raise ValueError("must be a share of the rows in [0, 1), or the name of a column that marks the validation rows")


def one_of(*choices: str) -> Rule:
    return functools.partial(_one_of, choices)


def _one_of(choices: tuple[str, ...], value: Any) -> Any:
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(repr(choice) for choice in choices)}")
    return value


def callables(value: Any) -> list[Any]:
    """A list of callables, or of lists of callables (one for each label column)."""
    found = items(value)
    for item in found:
        if not all(callable(one) for one in (item if isinstance(item, (list, tuple)) else [item])):
            raise ValueError("must be a list of functions, or of lists with one function for each label column")
    return found


def metrics(value: Any) -> Any:
    """What :func:`callables` takes, or a dict of these by their name in the history."""
    if callable(value):
        raise ValueError("must be a list or a dict: give {'name': function}")
    if not isinstance(value, dict):
        return callables(value)
    if not all(isinstance(name, str) and name not in ("", "loss") for name in value):
        raise ValueError("must have names other than 'loss', if it is a dict")
    return dict(zip(value, callables(list(value.values())), strict=True))


def function(value: Any) -> Any:
    if not callable(value):
        raise ValueError("must be a function")
    return value


def functions(value: Any) -> Any:
    """A function, or a list with one for each label column."""
    if isinstance(value, (list, tuple)):
        return [function(item) for item in value]
    return function(value)


def positive(value: Any) -> float:
    if type(value) is bool or not isinstance(value, Real) or float(value) <= 0:
        raise ValueError("must be a number above 0")
    return float(value)


def output_kinds(value: Any) -> list[str]:
    """A list of kinds of output columns; a single kind stands for a list of one."""
    from hvd_cluster.estimators.scoring.output_columns import KINDS

    kinds = [value] if isinstance(value, str) else items(value)
    if not kinds or not all(kind in KINDS for kind in kinds):
        raise ValueError(f"must be a list of {', '.join(repr(kind) for kind in KINDS)}")
    return kinds


def tracking(value: Any) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    raise ValueError("must be True, or the name of an experiment")


def class_weights(value: Any) -> Any:
    """ "balanced", or a dict label -> weight >= 0."""
    if value == "balanced":
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError("must be 'balanced' or a dict label -> weight")
    try:
        found = {float(label): float(weight) for label, weight in value.items()}
    except (TypeError, ValueError):
        raise ValueError("must have numbers as labels and as weights") from None
    if min(found.values()) < 0:
        raise ValueError("has a weight below 0")
    return found


def stopping(value: Any) -> Any:
    """An EarlyStopping, or its patience."""
    from hvd_cluster.estimators.run.early_stopping import EarlyStopping

    return value if isinstance(value, EarlyStopping) else EarlyStopping(patience=whole(1)(value))


def sharding(value: Any) -> Any:
    """ "none", "zero1" or an FSDP2, for which "fsdp2" stands too."""
    from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2

    if value == "fsdp2":
        return FSDP2()
    if not isinstance(value, FSDP2) and value not in ("none", "zero1"):
        raise ValueError("must be 'none', 'zero1', 'fsdp2' or FSDP2(...)")
    return value


def communication(value: Any) -> Any:
    """ "every_step", or a PowerSGD, LocalSGD or DiLoCo."""
    from hvd_cluster.estimators.torch.strategies.communication import DiLoCo, LocalSGD, PowerSGD

    if value != "every_step" and not isinstance(value, (PowerSGD, LocalSGD, DiLoCo)):
        raise ValueError("must be 'every_step', PowerSGD(...), LocalSGD(...) or DiLoCo(...)")
    return value


def deprecated(remedy: str) -> Rule:
    return functools.partial(_deprecated, remedy)


def _deprecated(remedy: str, value: Any) -> Any:
    if value is not None:
        warnings.warn(f"this param has no effect: {remedy}", DeprecationWarning, stacklevel=6)
    return value
