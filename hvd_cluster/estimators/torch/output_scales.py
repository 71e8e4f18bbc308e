"""Whether a module returns probabilities or logits, by its losses or last layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn

_PROBABILITY = ((nn.BCELoss,), (F.binary_cross_entropy,))
_LOGIT = ((nn.CrossEntropyLoss,), (F.cross_entropy,))
_BINARY_LOGIT = (
    (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss),
    (F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss),
)
_SCALES = {"probability": _PROBABILITY, "logit": _LOGIT, "binary_logit": _BINARY_LOGIT}


def output_scales(model: nn.Module, losses: Sequence[Any], count: int) -> tuple[str, ...]:
    """One scale for each output.

    It is one of :data:`~hvd_cluster.estimators.scoring.output_columns.SCALES`.

    Args:
        model: the fitted module.
        losses: one for each of the first outputs, or none.
        count: the number of outputs.
    """
    scales = [_scale_of(loss) for loss in losses]
    scales += [""] * (count - len(scales))
    last = model
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if scales == [""] and isinstance(last, (nn.Sigmoid, nn.Softmax)):
        return ("probability",)
    return tuple(scales)


def _scale_of(loss: Any) -> str:
    while isinstance(loss, functools.partial):
        loss = loss.func
    for scale, (classes, functions) in _SCALES.items():
        if isinstance(loss, classes) or loss in functions:
            return scale
    return ""
