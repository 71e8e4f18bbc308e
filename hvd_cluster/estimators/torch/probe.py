"""Tries model, loss and metrics on a few rows in the driver, before workers run.

The trial also chooses the dtype of each column: the model's floating dtype, which Horovod uses for every column, unless
only int64 (bool for bools) works: embeddings, class labels. A feature with a whole number that the floating dtype
cannot hold stays int64 if the model takes that. Bools, and whole numbers stored as floats such as those of
StringIndexer, are tried as int64 last if they are labels. Where training passes whole numbers as stored, each feature
keeps its dtype if the model takes that, since arithmetic in another one has other results.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.data.schema import Schema
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.lossy_casts import inexact_value
from hvd_cluster.estimators.run.random_state import set_aside
from hvd_cluster.estimators.spec import Inputs, called, shapes_text
from hvd_cluster.estimators.torch.arguments import floating_dtype
from hvd_cluster.estimators.torch.model_pickling import copied
from hvd_cluster.estimators.torch.objective import Objective, as_outputs, named_outputs, of_labels, own_loss, per_row

logger = logging.getLogger(__name__)

#: The warning of torch's losses if the label is broadcast against the output.
_BROADCAST_WARNING = "Using a target size"
_CPU = torch.device("cpu")
_OUTPUTS_TEXT = "the model must return a tensor, or a tuple, list or dict of tensors"
_OUTPUT_FN_TEXT = "output_fn must return a tensor of what the model returns, or a tuple, list or dict of tensors"


@dataclass(frozen=True)
class TrialResult:
    """What the trial found."""

    inputs: Inputs
    #: Shape of one row of each output.
    output_shapes: tuple[tuple[int, ...], ...]
    #: Their names, or numbers where they have none.
    output_names: tuple[str, ...] = ()


class _Refused(Exception):
    """One choice of dtypes did not work; ``progress`` says how far the trial came."""

    whole = "int64"  #: the dtypes of whole numbers in this choice

    def __init__(self, text: str, progress: int) -> None:
        super().__init__(text)
        self.progress = progress


def probe(
    model: torch.nn.Module,
    inputs: Inputs,
    make_objective: Callable[[], Objective] | None,
    metrics: Sequence[Sequence[Any]],
    batch: Mapping[str, Tensor],
    schema: Schema,
    weighted: bool = False,
    as_stored: bool = False,
    batch_size: int = 32,
    output_fn: Callable[[Any], Any] | None = None,
) -> TrialResult:
    """Run a small batch through a copy of ``model``, the loss and the metrics.

    Args:
        make_objective: None if the user's training step computes the loss; then only the model's input is tried.
        batch: columns of a few rows, as the reader yields them.
        weighted: rows will be weighted, even if no column has their weights.
        as_stored: training passes whole numbers to the model as stored: these dtypes are tried first, then int64.
        batch_size: rows of a training batch. No more rows are tried.
        output_fn: takes what counts of the model's outputs.

    Raises:
        DataError: the model or the loss does not fit the columns; the text has the columns' shapes and the error of the
            model or the loss.
    """
    trial = copied(model).to(_CPU)

    def shapes_with(candidate: Inputs) -> dict[str, tuple[int, ...]]:
        with set_aside():
            for rows in dict.fromkeys([min(5, batch_size), min(7, batch_size)]):
                # A model may keep what it concluded from the dtypes of an earlier trial.
                tried_on = copied(trial) if inputs.label_keywords else trial
                found = _try(tried_on, candidate, make_objective, metrics, with_rows(batch, rows), weighted, output_fn)
                # With 5 rows an output of 5 values may fit by chance, so another number of rows is tried too.
                if make_objective is None or not any(rows in shape for shape in found.values()):
                    break
        return found

    refusals: list[_Refused] = []
    exact = list(dict.fromkeys(_exact_choices(trial, inputs, batch, as_stored)))
    choices = [choice for choice in _choices(trial, inputs, batch) if choice not in exact]
    for feature_dtypes, label_dtypes in (*exact, *choices):
        candidate = dataclasses.replace(inputs, feature_dtypes=feature_dtypes, label_dtypes=label_dtypes)
        try:
            found = shapes_with(candidate)
        except _Refused as refusal:
            whole = sorted({dtype for dtype in (*feature_dtypes, *label_dtypes) if "int" in dtype})
            refusal.whole = ", ".join(whole) or refusal.whole
            refusal.__cause__ = refusal.__context__ = None  # its frames hold the copy of the model
            refusals.append(refusal.with_traceback(None))
        else:
            if as_stored:
                candidate = _narrowed(candidate, batch, shapes_with)
            candidate.warn_of_inexact(batch)
            for name in candidate.float_labels_as_int64(batch):
                logger.info("label %r: the loss takes no floats, so it is given the whole numbers as int64", name)
            return TrialResult(candidate, tuple(found.values()), tuple(found))
    refusals = refusals[len(exact) :] + refusals[: len(exact)]  # the errors of the usual choice come first
    raise DataError(f"{_error_text(refusals)}\n{shapes_text(inputs, batch, schema)}")


def scoring_text(
    model: torch.nn.Module,
    found: TrialResult,
    batch: Mapping[str, Tensor],
    output_fn: Callable[[Any], Any] | None = None,
) -> str:
    """Why the model does not score rows as it was trained on them; empty if it does.

    Args:
        found: what :func:`probe` found in training mode.
        batch: a few rows, preprocessed as for scoring.
    """
    trial = copied(model).to(_CPU).eval()
    rows = len(next(iter(batch.values())))
    try:
        found.inputs.require_whole(batch)
        with set_aside(), torch.no_grad():
            outputs = as_outputs(called(trial, found.inputs.features(batch, _CPU)), output_fn, found.output_names)
        shapes = tuple(tuple(output.shape[1:]) for output in outputs)
    except Exception as error:  # noqa: BLE001 - the user's own code, which may raise anything
        return f"{type(error).__name__}: {error}"
    if any(len(output) != rows for output in outputs):
        return f"it returns {len(outputs[0])} rows for {rows}"
    if len(shapes) != len(found.output_shapes):
        return f"it returns {len(shapes)} outputs, and {len(found.output_shapes)} in training"
    pairs = zip(shapes, found.output_shapes, strict=True)
    return "".join(f"it returns rows of shape {one}, and {other} in training. " for one, other in pairs if one != other)


def _error_text(refusals: Sequence[_Refused]) -> str:
    """The errors of the choices that came furthest.

    One of them may be refused for its dtype only, and another for the mistake: a class that is out of bounds.
    """
    furthest = max(refusal.progress for refusal in refusals)
    found: dict[str, str] = {}
    for refusal in refusals:
        if refusal.progress == furthest:
            found.setdefault(str(refusal), refusal.whole)
    (first, _), *others = found.items()
    return "\n".join([first, *(f"with whole numbers as {whole}: {text.splitlines()[0]}" for text, whole in others)])


def _choices(
    model: torch.nn.Module, inputs: Inputs, batch: Mapping[str, Tensor]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """dtypes of features and labels to try, the preferred ones first."""
    floating: torch.dtype = getattr(torch, floating_dtype(model))

    def dtypes_of(names: Sequence[str], own: bool) -> tuple[str, ...]:
        """The floating dtype for all, or whole numbers in their ``own``."""
        dtypes = (batch[name].dtype for name in names)
        return tuple(_name(floating if dtype.is_floating_point or not own else _whole(dtype)) for dtype in dtypes)

    if inputs.made is None:
        features = [dtypes_of(inputs.feature_cols, own) for own in (False, True)]
    else:  # the user's function has chosen
        own = (batch[name].dtype for name in inputs.made)
        features = [tuple(_name(floating if dtype.is_floating_point else dtype) for dtype in own)]
    # A model that computes its own loss may choose it by the labels' dtype.
    labels = [dtypes_of(inputs.label_cols, whole) for whole in ((True,) if inputs.label_keywords else (False, True))]
    whole_labels = tuple(
        "int64" if dtype == "bool" or (batch[name].is_floating_point() and _are_whole(batch[name])) else dtype
        for name, dtype in zip(inputs.label_cols, labels[-1], strict=True)
    )
    return list(dict.fromkeys([*itertools.product(features, labels), *((each, whole_labels) for each in features)]))


def _are_whole(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all() and (values == values.round()).all())


def _exact_choices(
    model: torch.nn.Module, inputs: Inputs, batch: Mapping[str, Tensor], as_stored: bool
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Choices that keep whole numbers inexact in floats, or all with ``as_stored``."""
    if inputs.made is not None:
        return
    floating = floating_dtype(model)
    kept = {
        name: batch[name].dtype
        for name in inputs.feature_cols
        if not batch[name].is_floating_point() and (as_stored or inexact_value(batch[name], floating) is not None)
    }
    if not kept:
        return
    widened = {name: _whole(dtype) for name, dtype in kept.items()}
    for dtypes in (kept, widened) if as_stored else (widened,):
        features = tuple(_name(dtypes[name]) if name in dtypes else floating for name in inputs.feature_cols)
        for labels in dict.fromkeys(labels for _, labels in _choices(model, inputs, batch)):
            yield features, labels


def _narrowed(found: Inputs, batch: Mapping[str, Tensor], try_with: Callable[[Inputs], Any]) -> Inputs:
    """The inputs with features as stored where the model takes that, else int64."""
    for index, name in enumerate(found.arguments):
        dtypes, stored = [*found.feature_dtypes], batch[name].dtype
        if dtypes[index] == "int64" and not (stored.is_floating_point or stored == torch.int64):
            dtypes[index] = _name(stored)
            narrower = dataclasses.replace(found, feature_dtypes=tuple(dtypes))
            with contextlib.suppress(_Refused):
                try_with(narrower)
                found = narrower
    return found


def _try(
    model: torch.nn.Module,
    inputs: Inputs,
    make_objective: Callable[[], Objective] | None,
    metrics: Sequence[Sequence[Any]],
    batch: Mapping[str, Tensor],
    weighted: bool,
    output_fn: Callable[[Any], Any] | None,
) -> dict[str, tuple[int, ...]]:
    """Try a forward and backward pass and metrics; return each output's row shape."""
    rows = len(next(iter(batch.values())))
    model.train()
    features = _attempt(
        lambda: inputs.features(batch, _CPU),
        "input_shapes does not fit the feature columns",
        0,
        "\nthe first size of each shape is the number of rows: write -1, and then the shape of one row",
    )
    raw = _attempt(
        lambda: called(model, features, **inputs.label_arguments(inputs.labels(batch, _CPU))),
        f"the model does not take {'what preprocess returns' if inputs.made is not None else 'the feature columns'}",
        1,
        _advice_on_features(inputs, batch),
    )
    named = _attempt(
        lambda: named_outputs(raw if output_fn is None else output_fn(raw), inputs.label_cols),
        _OUTPUTS_TEXT if output_fn is None else _OUTPUT_FN_TEXT,
        1,
    )
    for output in named.values():
        if not isinstance(output, Tensor) or not output.dim() or len(output) != rows:
            shown = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise _Refused(
                f"the model must return tensors with one row for each row of its input ({rows}), not {shown}", 2
            )
    shapes = {name: tuple(output.shape[1:]) for name, output in named.items()}
    if make_objective is None:
        return shapes
    outputs = of_labels(named, inputs.label_cols)
    objective = _attempt(make_objective, "the loss cannot be constructed", 2)
    objective = dataclasses.replace(objective, losses=tuple(_as_new(fn) for fn in objective.losses))
    if (objective.losses or metrics) and (text := wrong_outputs(outputs, inputs)):
        raise _Refused(text, 2)
    labels = inputs.labels(batch, _CPU)
    shaped = _attempt(lambda: objective.shaped_labels(outputs, labels), "label_shapes does not fit the labels", 2)
    weights = inputs.sample_weights(batch, _CPU)
    if weighted and weights is None:
        weights = torch.ones(rows)
    total: Any = 0.0 if objective.losses else _attempt(lambda: own_loss(raw), "there is no loss", 3)
    for name, fn, output, label in zip(inputs.label_cols, objective.losses, outputs, shaped, strict=False):
        total = total + _try_loss(name, fn, output, label, weights)
    if not isinstance(total, Tensor) or not total.requires_grad:
        raise _Refused("the loss does not depend on any trainable parameter of the model: no gradient reaches them", 4)
    _attempt(total.backward, "the gradient of the loss cannot be computed", 4)
    for index, group in enumerate(metrics):
        for name, metric, output, label in zip(inputs.label_cols, group, outputs, shaped, strict=True):
            _try_metric(f"metrics[{index}]", name, _as_new(metric), output.detach(), label)
    return shapes


def _as_new(fn: Any) -> Any:
    """A copy of a loss or metric, as workers must not inherit its state; else itself."""
    try:
        return copy.deepcopy(fn)
    except Exception:  # noqa: BLE001 - copying runs user code, which may raise anything
        return fn


def wrong_outputs(outputs: Sequence[Any], inputs: Inputs) -> str:
    """The mistake if there is not one output for each label column; else empty."""
    if len(outputs) == len(inputs.label_cols):
        return ""
    return (
        f"the model returns {len(outputs)} output(s) for {len(inputs.label_cols)} label column(s): it must return one "
        "for each, in their order or in a dict under their names, to which it may add others"
    )


def _try_loss(name: str, fn: Any, output: Tensor, label: Tensor, weights: Tensor | None) -> Tensor:
    values = "" if label.is_floating_point() else f" from {label.min()} to {label.max()}"
    sizes = f"output {tuple(output.shape)}, label {tuple(label.shape)}{values}"
    if weights is not None:
        value = _attempt(
            lambda: per_row(fn, output, label),
            f"the loss for {name!r} must take reduction='none' because sample_weight_col is set, or class_weights "
            f"({sizes})",
            3,
        )
        if not isinstance(value, Tensor) or value.numel() % len(weights):
            text = f"the loss for {name!r} with reduction='none' must return one value for each row ({sizes})"
            raise _Refused(text, 3)
        return value.mean()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_BROADCAST_WARNING)
        value = _attempt(lambda: fn(output, label), f"the loss does not take output and label of {name!r} ({sizes})", 3)
    if not isinstance(value, Tensor):
        raise _Refused(
            f"the loss for {name!r} must return a scalar tensor, not {type(value).__name__}: compute it with torch", 4
        )
    if value.numel() != 1:
        raise _Refused(
            f"the loss for {name!r} must return a scalar, not a tensor of shape {tuple(value.shape)} ({sizes}): "
            "reduce it, for example with .mean()",
            4,
        )
    return value.reshape(())


def _try_metric(where: str, name: str, metric: Any, output: Tensor, label: Tensor) -> None:
    sizes = f"output {tuple(output.shape)}, label {tuple(label.shape)}"
    value = _attempt(lambda: metric(output, label), f"{where} does not take output and label of {name!r} ({sizes})", 5)
    number = _attempt(lambda: torch.as_tensor(value), f"{where} must return a number for {name!r}, not {value!r}", 5)
    if number.numel() != 1:
        raise _Refused(f"{where} must return one number for {name!r}, not a tensor of shape {tuple(number.shape)}", 5)


def _attempt(what: Callable[[], Any], complaint: str, progress: int, advice: str = "") -> Any:
    try:
        return what()
    except Exception as error:  # the user's own code, which may raise anything
        text = f"{complaint}: {type(error).__name__}: {error}{_layer_text(error)}{advice}"
        has_dtypes = progress == 3 and isinstance(error, IndexError)  # a loss that has looked for a class
        raise _Refused(text, progress + has_dtypes) from error


def _layer_text(error: Exception) -> str:
    """The innermost layer that an exception came through; empty if it is the model."""
    below = error.__traceback__ and error.__traceback__.tb_next  # f_locals of the caller's frame would keep the error
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(below)]
    modules = [one for one in selves if isinstance(one, torch.nn.Module)]
    names = {id(module): name for name, module in modules[0].named_modules()} if modules else {}
    name = names.get(id(modules[-1])) if modules else None
    return f", in layer {name!r}, a {type(modules[-1]).__name__}({modules[-1].extra_repr()})" if name else ""


def _advice_on_features(inputs: Inputs, batch: Mapping[str, Tensor]) -> str:
    """Lines on how columns become arguments, if shapes suggest a mistake; else empty."""
    if inputs.made is not None:
        how = "by name" if inputs.by_keyword else "in this order: not all of these are names of its parameters"
        text = "" if inputs.unnamed else f"\nthe model's forward() gets {', '.join(inputs.made)} {how}"
        whole = [f"{name} ({_name(batch[name].dtype)})" for name in inputs.made if not batch[name].is_floating_point()]
        if whole:
            text += f"\nreturn floats where the model computes with numbers: {', '.join(whole)} is passed as returned"
        return text
    sizes = [batch[name].shape[1:] for name in inputs.feature_cols]
    lines = []
    if inputs.input_shapes is None and not all(sizes):
        wanted = [[-1, *(size or (1,))] for size in sizes]
        lines.append(f"a column of single numbers is a batch of shape (rows); input_shapes={wanted} makes it (rows, 1)")
    if len(sizes) > 1:
        lines.append(
            "each feature column is a separate argument of the model, in this order; for one argument, put the "
            "numbers into one column of lists"
        )
    return "".join(f"\n{line}" for line in lines)


def with_rows(batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The batch with exactly ``rows`` rows."""
    return {name: tensor[torch.arange(rows) % len(tensor)] for name, tensor in batch.items()}


def _whole(dtype: torch.dtype) -> torch.dtype:
    return torch.bool if dtype == torch.bool else torch.int64


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
