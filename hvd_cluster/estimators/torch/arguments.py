"""How what ``preprocess`` returns becomes the arguments of a module, by the signature of its ``forward``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import torch

from hvd_cluster.estimators.spec import Inputs

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def with_arguments(inputs: Inputs, model: torch.nn.Module, made: Mapping[str, torch.Tensor]) -> Inputs:
    """The inputs, with the names, dtypes and way of passing of the module's arguments.

    They go by name if ``forward`` has a parameter for each; otherwise in the order of the feature columns, if these are
    their names, or else in the order of ``made``. Floats get the module's floating dtype.

    Args:
        made: what ``preprocess`` has returned, by name.
    """
    names, takes_any = _parameters(model)
    by_keyword = set(made) <= names or (takes_any and bool(set(made) & names))
    ordered = inputs.feature_cols if set(made) == set(inputs.feature_cols) else tuple(made)
    floating = floating_dtype(model)
    dtypes = (floating if made[name].is_floating_point() else str(made[name].dtype) for name in ordered)
    return dataclasses.replace(
        inputs,
        made=tuple(ordered),
        by_keyword=by_keyword,
        feature_dtypes=tuple(dtype.removeprefix("torch.") for dtype in dtypes),
    )


def label_keywords(model: torch.nn.Module, label_cols: Sequence[str]) -> tuple[str, ...]:
    """The parameters of ``forward`` that take the labels; () if it has none.

    They are named like the label columns, or a single one is "labels", as in transformers.
    """
    names, _ = _parameters(model)
    if set(label_cols) <= names:
        return tuple(label_cols)
    return ("labels",) if len(label_cols) == 1 and "labels" in names else ()


def floating_dtype(model: torch.nn.Module) -> str:
    """torch's name of the module's floating dtype."""
    found = next((one.dtype for one in model.parameters() if one.dtype.is_floating_point), torch.float32)
    return str(found).removeprefix("torch.")


def _parameters(model: torch.nn.Module) -> tuple[set[str], bool]:
    """The names of a module's parameters, and whether it takes keywords of any name."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a scripted module
        return set(), False
    return (
        {parameter.name for parameter in parameters if parameter.kind in _NAMED},
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    )
