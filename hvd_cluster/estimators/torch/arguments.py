"""How the results of ``preprocess`` become arguments of a module's ``forward``.

The signature of ``forward`` decides.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_cluster.data.preprocessing import UNNAMED
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.spec import Inputs

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def with_arguments(inputs: Inputs, model: torch.nn.Module, made: Mapping[str, torch.Tensor]) -> Inputs:
    """The inputs, with names, dtypes and way of passing of the module's arguments.

    Several go by name if ``forward`` has a parameter for each, or takes any; otherwise in the order of the feature
    columns, if these are their names, or else in the order of ``made``, if none is the name of a parameter. A single
    one goes by name unless it has that of a column, as what is returned without a name has. Floats get the module's
    floating dtype.

    Args:
        made: what ``preprocess`` has returned, by name.

    Raises:
        DataError: some are names of parameters, and others are not.
    """
    names, takes_any, takes_order = _parameters(model)
    given = set(made)
    in_columns = given == set(inputs.feature_cols)
    unnamed = len(made) == 1 and given <= {*inputs.feature_cols, *UNNAMED}
    if unnamed and takes_order:
        by_keyword = False
    elif takes_any:
        by_keyword = bool(given & names) or not takes_order or (len(made) > 1 and not in_columns)
    else:
        by_keyword = given <= names
        if given & names and not by_keyword and not in_columns:
            raise DataError(partial_text("forward()", [name for name in made if name not in names], sorted(names)))
    ordered = inputs.feature_cols if in_columns else tuple(made)
    floating = floating_dtype(model)
    dtypes = (floating if made[name].is_floating_point() else str(made[name].dtype) for name in ordered)
    return dataclasses.replace(
        inputs,
        made=tuple(ordered),
        by_keyword=by_keyword,
        feature_dtypes=tuple(dtype.removeprefix("torch.") for dtype in dtypes),
    )


def partial_text(target: str, others: Sequence[str], known: Sequence[str]) -> str:
    """The error for names of which only some are known to the model."""
    return (
        f"preprocess returned {', '.join(map(repr, others))}, which the model's {target} does not take; it takes "
        f"{', '.join(known)}. Leave out what the model does not need. (Names of which none is known there go in their "
        "order.)"
    )


def label_keywords(model: torch.nn.Module, label_cols: Sequence[str]) -> tuple[str, ...]:
    """The parameters of ``forward`` that take the labels; () if it has none.

    They are named like the label columns, or a single one is "labels", as in transformers.
    """
    names, _, _ = _parameters(model)
    if set(label_cols) <= names:
        return tuple(label_cols)
    return ("labels",) if len(label_cols) == 1 and "labels" in names else ()


def floating_dtype(model: torch.nn.Module) -> str:
    """torch's name of the module's floating dtype."""
    found = next((one.dtype for one in model.parameters() if one.dtype.is_floating_point), torch.float32)
    return str(found).removeprefix("torch.")


def _parameters(model: torch.nn.Module) -> tuple[set[str], bool, bool]:
    """A module's argument names; whether it takes any keyword; and unnamed arguments."""
    try:
        parameters = inspect.signature(_unwrapped(model).forward).parameters.values()
    except (TypeError, ValueError):  # a scripted module
        return set(), False, True
    kinds = {parameter.kind for parameter in parameters}
    return (
        {parameter.name for parameter in parameters if parameter.kind in _NAMED},
        inspect.Parameter.VAR_KEYWORD in kinds,
        bool(kinds - {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}),
    )


def _unwrapped(model: Any) -> Any:
    """The module inside of those whose ``forward`` passes on whatever it gets."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # of torch.compile
        if isinstance(model, torch.nn.DataParallel):
            inner = model.module
        elif hasattr(model, "get_base_model"):  # of peft
            inner = model.get_base_model()
        if inner is None:
            return model
        model = inner
