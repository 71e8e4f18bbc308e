"""What a worker needs to train: frozen, picklable values."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hvd_cluster.data.preprocessing import UNNAMED, Preprocess
from hvd_cluster.data.schema import Schema
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.lossy_casts import inexact_text, inexact_value
from hvd_cluster.estimators.torch.objective import Objective, reshaped

if TYPE_CHECKING:
    # Not at run time: this module is copied into models for MLflow, with what it imports.
    from hvd_cluster.data.dataset import Dataset
    from hvd_cluster.data.store import Store
    from hvd_cluster.estimators.run.early_stopping import EarlyStopping
    from hvd_cluster.estimators.torch.model_source import ModelSource
    from hvd_cluster.estimators.torch.optimizer_state import OptimizerState

logger = logging.getLogger(__name__)


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

#: Columns of some rows.
Batch = TypeVar("Batch", bound=Mapping[str, torch.Tensor])
#: The model's positional arguments, or its keyword arguments.
Features = list[torch.Tensor] | dict[str, torch.Tensor]


def called(model: Callable[..., Any], features: Features, **more: torch.Tensor) -> Any:
    """What the model returns for its arguments."""
    return model(**features, **more) if isinstance(features, dict) else model(*features, **more)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How columns become the model's arguments and labels."""

    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    sample_weight_col: str | None = None
    #: Shape of each feature's batch, -1 for the rows; None: (rows, *shape of the column).
    input_shapes: tuple[tuple[int, ...], ...] | None = None
    #: Names of what ``preprocess`` returns, in the order of the model's arguments; None without it.
    made: tuple[str, ...] | None = None
    #: The model gets them by name.
    by_keyword: bool = False
    #: Names by which the model gets the labels too, to compute its own loss; () if it does not.
    label_keywords: tuple[str, ...] = ()
    #: dtype of each argument, by torch's name; the driver chooses it.
    feature_dtypes: tuple[str, ...] = ()
    #: dtype of each label, likewise.
    label_dtypes: tuple[str, ...] = ()
    #: Columns with a value that its dtype cannot hold, which have been reported.
    reported: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The model's part of a batch: features, or what ``preprocess`` makes of them."""
        return self.feature_cols if self.made is None else self.made

    @property
    def unnamed(self) -> bool:
        """Whether ``preprocess`` returns one array without a name, as far as is known."""
        return self.made is not None and len(self.made) == 1 and self.made[0] in {*UNNAMED, *self.feature_cols}

    def checked(self, batch: Batch) -> Batch:
        """The batch itself, on the CPU: on a GPU each check would wait for earlier work.

        Raises:
            DataError: see :meth:`require_whole`.
        """
        self.require_whole(batch)
        self.warn_of_inexact(batch)
        return batch

    def require_whole(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Refuse a batch with numbers that its whole dtype would wrap or truncate.

        Raises:
            DataError: a dtype of integers or bools was chosen for the rows of the trial, and cannot hold a number.
        """
        for name, dtype in self._dtypes_in(batch):
            if getattr(torch, dtype).is_floating_point:
                continue
            if (value := inexact_value(batch[name], dtype)) is not None:
                raise DataError(self._unfit_text(name, value, dtype))

    def _unfit_text(self, name: str, value: float, dtype: str) -> str:
        if name not in self.arguments:
            return (
                f"label column {name!r} holds {value}: the loss takes whole numbers only ({dtype}), and the rows of "
                "the trial held nothing else. Correct the column, or use a loss that takes floats"
            )
        if self.made is None:
            return (
                f"feature column {name!r} holds {value}, which {dtype} cannot hold, and the model takes the column as "
                f"{dtype}: correct the column, or fit a model that takes it as float or in a wider dtype"
            )
        wider = "float32" if not float(value).is_integer() else "int64"
        return (
            f"preprocess returned {value} in {name!r}, but {dtype} for the rows that the model was tried on, which "
            f"cannot hold it: return one dtype for all batches, as array.astype({wider!r}) does"
        )

    def _dtypes_in(self, batch: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
        """The arguments and labels in the batch with their dtypes; none before the trial."""
        wanted = (*zip(self.arguments, self.feature_dtypes), *zip(self.label_cols, self.label_dtypes))  # noqa: B905
        return [(name, dtype) for name, dtype in wanted if name in batch]

    def warn_of_inexact(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Warn once for each column with a value that the model's dtype cannot hold."""
        for name, dtype in self._dtypes_in(batch):
            if name in self.reported:
                continue
            if (value := inexact_value(batch[name], dtype)) is not None:
                self.reported.add(name)
                logger.warning("%s", inexact_text(name, value, dtype))

    def features(self, batch: Mapping[str, torch.Tensor], device: torch.device) -> Features:
        """The model's arguments, in the way in which it gets them."""
        tensors = self.tensors(batch, device)
        return dict(zip(self.arguments, tensors, strict=True)) if self.by_keyword else tensors

    def tensors(self, batch: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """A tensor for each feature column, or for each name that ``preprocess`` returns."""
        dtypes = [getattr(torch, dtype) for dtype in self.feature_dtypes]
        tensors = [
            batch[name].to(device=device, dtype=dtype) for name, dtype in zip(self.arguments, dtypes, strict=True)
        ]
        if self.input_shapes is None:
            return tensors
        return [reshaped(tensor, shape) for tensor, shape in zip(tensors, self.input_shapes, strict=True)]

    def labels(self, batch: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """One tensor for each label column, in the column's shape."""
        return [
            batch[name].to(device=device, dtype=getattr(torch, dtype))
            for name, dtype in zip(self.label_cols, self.label_dtypes, strict=True)
        ]

    def label_arguments(self, labels: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The labels that the model gets, by the names of its arguments."""
        return dict(zip(self.label_keywords, labels, strict=False))

    def float_labels_as_int64(self, batch: Mapping[str, torch.Tensor]) -> list[str]:
        """The label columns that are stored as floats and passed to the loss as int64."""
        pairs = zip(self.label_cols, self.label_dtypes, strict=True)
        return [name for name, dtype in pairs if dtype == "int64" and name in batch and batch[name].is_floating_point()]

    def sample_weights(self, batch: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor | None:
        """(rows,) float32, or None.

        Raises:
            DataError: the column holds several numbers a row.
        """
        if self.sample_weight_col is None:
            return None
        weights = batch[self.sample_weight_col]
        if weights.numel() != len(weights):
            raise DataError(
                f"sample_weight_col={self.sample_weight_col!r} holds {weights[0].numel()} numbers a row: give a column "
                "with one"
            )
        return weights.to(device=device, dtype=torch.float32).reshape(-1)


def shapes_text(inputs: Inputs, batch: Mapping[str, torch.Tensor], schema: Schema) -> str:
    """What ``preprocess`` returned, and a line per column with its role and shape."""
    lines = []
    columns = inputs.feature_cols if inputs.made is None else ()
    for index, name in enumerate((*columns, *inputs.label_cols)):
        role = "feature" if index < len(columns) else "label"
        stored = f", {schema[name].kind.value} in the data" if name in schema else ""
        line = f"  {role} {name!r}: batch of {_shape_text(batch[name])}{stored}"
        if role == "feature" and inputs.input_shapes is not None:
            line += f", given to the model as {inputs.input_shapes[index]}"
        lines.append(line)
    if lines:
        lines.insert(0, "the columns are:")
    if inputs.made is not None:
        names = ["one array"] if inputs.unnamed else map(repr, inputs.made)
        made = [f"{name} of {_shape_text(batch[key])}" for name, key in zip(names, inputs.made, strict=True)]
        lines.insert(0, f"preprocess returned {', '.join(made)}")
    return "\n".join(lines)


def error_text(error: BaseException) -> str:
    """The type and text of an exception, without codes for bold text, as in Keras's."""
    return f"{type(error).__name__}: {_ESCAPES.sub('', str(error))}"


@contextlib.contextmanager
def as_warnings(text: str) -> Iterator[None]:
    """Log an exception as a warning that begins with ``text``.

    An exception must not cost the model, or hide another error.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of a store, a tracking server or a cluster, which may raise anything
        logger.warning("%s: %s", text, error_text(error))


def _shape_text(values: torch.Tensor) -> str:
    return f"shape (rows{''.join(f', {n}' for n in values.shape[1:])})"


@dataclass(frozen=True, kw_only=True)
class FitSpec:
    """A run of any framework; each framework's spec adds the model and its training."""

    run_id: str
    inputs: Inputs
    #: Shape of one row of each output.
    output_shapes: tuple[tuple[int, ...], ...]
    #: The name of each; () if there is one for each label column.
    output_names: tuple[str, ...] = ()
    dataset: Dataset
    #: Keeps checkpoints and logs; the data may be in another store.
    store: Store
    #: Folders of exactly the training and the validation rows (None: there are none), for a ``data_module``.
    part_dirs: tuple[str, str | None] | None = None
    #: Workers cannot see ``store``: they send checkpoints to the driver, and get one back in ``resume``.
    store_on_driver: bool = False
    #: Workers report to the driver through files in the store only.
    report_through_store: bool = False
    #: A checkpoint to resume from, if workers cannot see the store.
    resume: bytes | None = field(default=None, repr=False)
    #: The checkpoint of the best epoch so far, likewise.
    resume_best: bytes | None = field(default=None, repr=False)
    #: Digest of the rows that the checkpoint was trained on, if they reach workers without a store.
    data_digest: str = ""
    #: Rows of a batch, per worker.
    batch_size: int
    val_batch_size: int
    epochs: int
    seed: int
    shuffle: bool = True
    #: None: one pass over the rows.
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    train_reader_threads: int = 2
    val_reader_threads: int = 2
    reader_pool_type: str = "thread"
    inmemory_cache_all: bool = False
    transformation_fn: Any = None
    #: What makes the model's arguments of the feature columns; None if those are the arguments.
    preprocess: Preprocess | None = None
    #: A class of the user's own that reads the data; see :mod:`hvd_cluster.estimators.run.data_module`.
    data_module: Any = None
    #: Further keyword arguments of ``data_module``.
    data_module_args: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    gradient_compression: Any = None
    backward_passes_per_step: int = 1
    scale_lr: bool = True
    use_gpu: bool = True
    mp_start_method: str | None = None
    #: The backend of torch.distributed's default group; None for no group.
    torch_backend: str | None = None
    #: "none", "zero1" or an FSDP2: what each worker holds a part of only.
    sharding: Any = "none"
    #: "every_step", a PowerSGD, or a LocalSGD or DiLoCo, with which workers train apart in rounds.
    communication: Any = "every_step"
    verbose: int = 1
    #: End the fit when the loss or the weights are not finite.
    terminate_on_nan: bool = True
    #: Epochs between two checkpoints, and steps between two within an epoch (None: none).
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    early_stopping: EarlyStopping | None = None
    #: Return the weights of the best epoch instead of the last.
    return_best: bool = False

    @property
    def trained_with(self) -> tuple[str, ...]:
        """The modules whose versions a fit logs."""
        return ("torch",)

    @property
    def saves_shards(self) -> bool:
        """Whether workers hold different tensors, of which each saves its own."""
        return bool(self.sharding != "none" or self.communication != "every_step")

    @property
    def has_validation(self) -> bool:
        """Whether there are validation rows."""
        return self.dataset.validation is not None and self.dataset.validation.rows > 0


@dataclass(frozen=True, kw_only=True)
class TrainSpec(FitSpec):
    """All that :func:`hvd_cluster.estimators.torch.train.train` needs."""

    #: A module, or the factory with which each worker makes its own.
    model: torch.nn.Module | ModelSource
    optimizer: OptimizerState
    #: Makes the objective in the worker: parts of a loss may have to be built there.
    objective: Callable[[], Objective]
    #: Groups of fn(output, label) -> number, one function for each label column in a group.
    metrics: tuple[tuple[Any, ...], ...] = ()
    #: The name of each in the history.
    metric_names: tuple[tuple[str, ...], ...] = ()
    train_minibatch_fn: Any = None
    validation_minibatch_fn: Any = None
    #: function(optimizer) -> a scheduler of ``torch.optim.lr_scheduler``; None for constant rates.
    lr_scheduler: Any = None
    #: "epoch" or "step": how often the scheduler is stepped.
    lr_scheduler_interval: str = "epoch"
    gradient_clip_norm: float | None = None
    gradient_clip_value: float | None = None
    #: "bf16", "fp16" or None.
    mixed_precision: str | None = None
    #: "balanced", or label -> weight of the rows that have it; None: all rows count alike.
    class_weights: Any = None


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a worker returns; only rank 0 fills in more than ``rank`` and ``size``."""

    rank: int
    size: int
    #: ``torch.save`` of the model's and the optimizer's state on the CPU, with unscaled learning rates; empty except on
    #: rank 0.
    state: bytes = field(default=b"", repr=False)
    #: One record for each epoch.
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class MakeObjective:
    """Builds the objective from ready losses or from functions that make them."""

    losses: tuple[Any, ...]
    constructed: bool
    loss_weights: tuple[float, ...]
    label_shapes: tuple[tuple[int, ...], ...] | None
    output_fn: Callable[[Any], Any] | None = None
    label_cols: tuple[str, ...] = ()

    def __call__(self) -> Objective:
        losses = tuple(make() for make in self.losses) if self.constructed else self.losses
        return Objective(losses, self.loss_weights, self.label_shapes, self.output_fn, self.label_cols)
