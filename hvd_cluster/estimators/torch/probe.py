"""The model, the loss and the metrics tried on the driver, on a few rows, before any worker starts.

The trial also settles what dtype each column has at the model's edge: the model's own floating dtype, as Horovod had
it for every column, unless that does not work there and int64 (bool for bools) does: embeddings, class labels. A
feature with a whole number that the floating dtype cannot hold stays int64 where the model takes that. Labels that are
whole numbers but stored as floats, as StringIndexer's are, are tried as int64 last.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.data.schema import Schema
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.exactness import inexact_value
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.torch.model_pickling import copied
from hvd_cluster.estimators.torch.objective import Objective, as_outputs, per_row

logger = logging.getLogger(__name__)

#: What torch's own losses warn of when the label is broadcast against the output.
_BROADCAST_WARNING = "Using a target size"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Findings:
    """What the trial settled."""

    inputs: Inputs
    #: Shape of one row of each output.
    output_shapes: tuple[tuple[int, ...], ...]


class _Refused(Exception):
    """One choice of dtypes did not work; ``progress`` tells how far it came."""

    def __init__(self, text: str, progress: int) -> None:
        super().__init__(text)
        self.progress = progress


def probe(
    model: torch.nn.Module,
    inputs: Inputs,
    make_objective: Callable[[], Objective],
    metrics: Sequence[Sequence[Any]],
    batch: Mapping[str, Tensor],
    schema: Schema,
    custom_step: bool = False,
    weighted: bool = False,
    as_stored: bool = False,
    batch_size: int = 32,
) -> Findings:
    """Run one small batch through a copy of ``model`` and through the loss and the metrics.

    Args:
        batch: columns of a few rows, as the reader yields them.
        custom_step: a step of the user's own computes the loss; only the model's input is tried.
        weighted: rows will be weighted, also where no column has their weights.
        as_stored: training hands whole numbers to the model as they are: the model is first tried with these.
        batch_size: rows of a training batch: no more are tried, and as many where ``input_shapes`` have no -1.

    Raises:
        DataError: the model or the loss does not fit the columns; the text names the columns' shapes, and what the
            model or the loss complained of.
    """
    trial = copied(model).to(_CPU)
    is_fixed = any(-1 not in shape for shape in inputs.input_shapes or ())
    first, second = (batch_size, batch_size) if is_fixed else (min(5, batch_size), min(7, batch_size))
    refusals: list[_Refused] = []
    exact = list(_exact_choices(trial, inputs, batch, as_stored))
    choices = [choice for choice in _choices(trial, inputs, batch) if choice not in exact]
    for feature_dtypes, label_dtypes in (*exact, *choices):
        candidate = dataclasses.replace(inputs, feature_dtypes=feature_dtypes, label_dtypes=label_dtypes)
        try:
            with torch.random.fork_rng(devices=[]):
                given = _repeat(batch, first)
                shapes = _try(trial, candidate, make_objective, metrics, given, custom_step, weighted)
                if not custom_step and second != first and any(first in shape for shape in shapes):
                    # An output of 5 values meets 5 rows: a wrong shape might fit by chance. So with another number too.
                    given = _repeat(batch, second)
                    shapes = _try(trial, candidate, make_objective, metrics, given, custom_step, weighted)
        except _Refused as refusal:
            refusals.append(refusal)
        else:
            candidate.warn_of_inexact(batch)
            _tell_of_whole_labels(candidate, batch)
            return Findings(candidate, shapes)
    refusals = refusals[len(exact) :] + refusals[: len(exact)]  # what most models are wrong about comes first
    raise DataError(f"{_told(refusals)}\n{shapes_text(inputs, batch, schema)}")


def _told(refusals: Sequence[_Refused]) -> str:
    """What is wrong with the choices that came furthest.

    One of them may be refused for its dtype alone, and only another for what is wrong: a class that is out of bounds.
    """
    furthest = max(refusal.progress for refusal in refusals)
    first, *others = dict.fromkeys(str(refusal) for refusal in refusals if refusal.progress == furthest)
    return "\n".join([first, *(f"with whole numbers as int64: {text.splitlines()[0]}" for text in others)])


def floating_dtype(model: torch.nn.Module) -> str:
    """torch's name of the model's floating dtype."""
    return _name(next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32))


def _choices(
    model: torch.nn.Module, inputs: Inputs, batch: Mapping[str, Tensor]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """dtypes of features and labels to try, most welcome first."""
    floating: torch.dtype = getattr(torch, floating_dtype(model))

    def wanted(names: Sequence[str], own: bool) -> tuple[str, ...]:
        dtypes = (batch[name].dtype for name in names)
        return tuple(_name(floating if dtype.is_floating_point or not own else _whole(dtype)) for dtype in dtypes)

    def whole_labels() -> tuple[str, ...]:
        """As ``wanted(..., True)``, and floats as int64 where all tried values are whole numbers."""
        return tuple(
            "int64" if batch[name].is_floating_point() and _are_whole(batch[name]) else dtype
            for name, dtype in zip(inputs.label_cols, wanted(inputs.label_cols, True), strict=True)
        )

    seen = set()
    for own_features, own_labels in ((False, False), (False, True), (True, False), (True, True)):
        choice = (wanted(inputs.feature_cols, own_features), wanted(inputs.label_cols, own_labels))
        if choice not in seen:
            seen.add(choice)
            yield choice
    for own_features in (False, True):
        choice = (wanted(inputs.feature_cols, own_features), whole_labels())
        if choice not in seen:
            seen.add(choice)
            yield choice


def _tell_of_whole_labels(inputs: Inputs, batch: Mapping[str, Tensor]) -> None:
    """Say which labels the loss gets in another form than they are stored in."""
    for name in inputs.float_labels_as_int64(batch):
        logger.info("label %r: the loss takes no floats, so its whole numbers are given to it as int64", name)


def _are_whole(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all() and (values == values.round()).all())


def _exact_choices(
    model: torch.nn.Module, inputs: Inputs, batch: Mapping[str, Tensor], as_stored: bool
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Those that keep whole numbers of which the model's floating dtype would lose some (or all, ``as_stored``)."""
    floating = floating_dtype(model)
    dtypes = []
    for name in inputs.feature_cols:
        whole = not batch[name].is_floating_point()
        keeps = whole and (as_stored or inexact_value(batch[name], floating) is not None)
        dtypes.append(_name(_whole(batch[name].dtype)) if keeps else floating)
    if set(dtypes) == {floating}:
        return
    for labels in dict.fromkeys(labels for _, labels in _choices(model, inputs, batch)):
        yield tuple(dtypes), labels


def _try(
    model: torch.nn.Module,
    inputs: Inputs,
    make_objective: Callable[[], Objective],
    metrics: Sequence[Sequence[Any]],
    batch: Mapping[str, Tensor],
    custom_step: bool,
    weighted: bool,
) -> tuple[tuple[int, ...], ...]:
    """Shapes of one row of each output."""
    rows = len(next(iter(batch.values())))
    model.train()
    features = _attempt(lambda: inputs.features(batch, _CPU), "input_shapes does not fit the feature columns", 0)
    raw = _attempt(
        lambda: model(*features), "the model does not take the feature columns", 1, _advice_on_features(inputs, batch)
    )
    outputs = _attempt(lambda: as_outputs(raw), "the model must return a tensor, or a tuple or list of tensors", 1)
    for output in outputs:
        if not isinstance(output, Tensor) or not output.dim() or len(output) != rows:
            shown = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise _Refused(
                f"the model must return tensors with one row for each row of its input ({rows}), not {shown}", 2
            )
    shapes = tuple(tuple(output.shape[1:]) for output in outputs)
    if custom_step:
        return shapes
    if len(outputs) != len(inputs.label_cols):
        raise _Refused(
            f"the model returns {len(outputs)} output(s) for {len(inputs.label_cols)} label column(s): it must return "
            "one for each, in their order",
            2,
        )
    objective = _attempt(make_objective, "the loss cannot be constructed", 2)
    labels = inputs.labels(batch, _CPU)
    _, shaped = _attempt(
        lambda: objective.transform_outputs(outputs, labels), "label_shapes does not fit the labels", 2
    )
    weights = inputs.sample_weights(batch, _CPU)
    if weighted and weights is None:
        weights = torch.ones(rows)
    total: Any = 0.0
    for name, fn, output, label in zip(inputs.label_cols, objective.losses, outputs, shaped, strict=True):
        total = total + _try_loss(name, fn, output, label, weights)
    if not isinstance(total, Tensor) or not total.requires_grad:
        raise _Refused("the loss does not depend on any trainable parameter of the model: no gradient reaches them", 4)
    _attempt(total.backward, "the gradient of the loss cannot be computed", 4)
    for index, group in enumerate(metrics):
        for name, metric, output, label in zip(inputs.label_cols, group, outputs, shaped, strict=True):
            _try_metric(f"metrics[{index}]", name, metric, output.detach(), label)
    return shapes


def _try_loss(name: str, fn: Any, output: Tensor, label: Tensor, weights: Tensor | None) -> Tensor:
    sizes = f"output {tuple(output.shape)}, label {tuple(label.shape)}"
    if weights is not None:
        value = _attempt(
            lambda: per_row(fn, output, label),
            f"the loss for {name!r} must take reduction='none' because sample_weight_col is set, or class_weights "
            f"({sizes})",
            3,
        )
        if not isinstance(value, Tensor) or value.numel() % len(weights):
            raise _Refused(
                f"the loss for {name!r} with reduction='none' must return one value for each row ({sizes})", 3
            )
        return value.mean()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_BROADCAST_WARNING)
        value = _attempt(lambda: fn(output, label), f"the loss does not take output and label of {name!r} ({sizes})", 3)
    if not isinstance(value, Tensor):
        raise _Refused(
            f"the loss for {name!r} returns no scalar tensor but {type(value).__name__}: compute it with torch", 4
        )
    if value.numel() != 1:
        raise _Refused(
            f"the loss for {name!r} returns no scalar but a tensor of shape {tuple(value.shape)} ({sizes}): "
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
        raise _Refused(f"{complaint}: {type(error).__name__}: {error}{advice}", progress) from error


def _advice_on_features(inputs: Inputs, batch: Mapping[str, Tensor]) -> str:
    """What people whose columns are single numbers do not know; lines of their own, or nothing."""
    sizes = [batch[name].shape[1:] for name in inputs.feature_cols]
    lines = []
    if inputs.input_shapes is None and not all(sizes):
        wanted = [[-1, *(size or (1,))] for size in sizes]
        lines.append(f"a column of single numbers is a batch of shape (rows); input_shapes={wanted} makes it (rows, 1)")
    if len(sizes) > 1:
        lines.append(
            "each feature column is an argument of its own for the model, in this order; for one argument, put the "
            "numbers into one column of lists"
        )
    return "".join(f"\n{line}" for line in lines)


def _repeat(batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The batch with exactly ``rows`` rows: a number that no dimension of the outputs has."""
    return {name: tensor[torch.arange(rows) % len(tensor)] for name, tensor in batch.items()}


def shapes_text(inputs: Inputs, batch: Mapping[str, Tensor], schema: Schema) -> str:
    """What the columns are, a line for each."""
    lines = []
    for index, name in enumerate((*inputs.feature_cols, *inputs.label_cols)):
        role = "feature" if index < len(inputs.feature_cols) else "label"
        stored = f", {schema[name].kind.value} in the data" if name in schema else ""
        line = f"  {role} {name!r}: batch of shape (rows{''.join(f', {n}' for n in batch[name].shape[1:])}){stored}"
        if role == "feature" and inputs.input_shapes is not None:
            line += f", given to the model as {inputs.input_shapes[index]}"
        lines.append(line)
    return "\n".join(["the columns are:", *lines])


def _whole(dtype: torch.dtype) -> torch.dtype:
    return torch.bool if dtype == torch.bool else torch.int64


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
