"""The params of estimators and models: tables, and the accessors made from them.

Names, defaults and accessors are Horovod's, its odd spellings included.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hvd_cluster.data.preprocessing import BATCH_FORMATS, ON_ERROR
from hvd_cluster.estimators import values
from hvd_cluster.estimators.stages.param_row import Row
from hvd_cluster.estimators.stages.spark_ml import Param, Params
from hvd_cluster.estimators.stages.stage import PipelineStage
from hvd_cluster.estimators.values import whole

C = TypeVar("C", bound=type)


#: Params of every estimator and of the model that it returns.
PREPROCESS_ROWS = (
    Row(
        "preprocess",
        None,
        "fn(batch of the feature columns) -> what the model gets; applied in the reader and in transform",
        values.function,
    ),
    Row("batch_format", "numpy", "what preprocess gets: 'numpy' or 'pyarrow'", values.one_of(*BATCH_FORMATS)),
    Row(
        "on_error",
        "raise",
        "rows on which preprocess fails: 'raise', 'skip', or 'null' (null outputs in transform)",
        values.one_of(*ON_ERROR),
    ),
)

#: Params that every estimator has.
ESTIMATOR_ROWS = (
    Row("num_proc", None, "number of workers; None: all slots of the Spark session, or 1 for local data", whole(1)),
    Row("store", None, "folder or Store for intermediate data, checkpoints and logs"),
    Row("backend", None, "what runs the workers, instead of num_proc; see hvd_cluster.estimators.Backend", saved=False),
    Row(
        "model",
        None,
        "the model to train, which is not changed; or a function that makes it, such as a ModelFactory",
    ),
    Row("optimizer", None, "optimizer over the model's parameters; or, for PyTorch, fn(model) -> optimizer"),
    Row("loss", None, "fn(output, label) -> scalar, or a list with one for each label column", values.functions),
    Row("metrics", [], "list or dict of fn(output, label) -> number, or of lists with one per label", values.metrics),
    Row("loss_weights", None, "weight of each label column's loss; None: equal weights of sum 1", values.numbers),
    Row("sample_weight_col", None, "column with the weight of each row's loss", values.text, alias="weightCol"),
    Row(
        "feature_cols",
        None,
        "the model's columns, in order; None: all others",
        values.column_names,
        alias="featuresCol",
    ),
    Row(
        "label_cols",
        None,
        "columns that the outputs are compared with, in order",
        values.column_names,
        alias="labelCol",
    ),
    Row("continuous_cols", None, "passed to data_module", values.column_names),
    Row("categorical_cols", None, "passed to data_module", values.column_names),
    Row(
        "validation",
        None,
        "share of the rows, or the column that marks them (True or > 0)",
        values.share_or_column,
        alias="validationIndicatorCol",
    ),
    Row("callbacks", [], "list of fn(record, model), called on every rank after each epoch", values.items),
    Row("driver_callbacks", [], "list of fn(record), called in the driver after each epoch", values.callables),
    Row("batch_size", 32, "rows of a training batch, per worker", whole(1)),
    Row("val_batch_size", None, "rows of a validation batch, per worker; None: batch_size", whole(1)),
    Row("epochs", 1, "passes over the training rows", whole(1)),
    Row("verbose", 1, "0: silent; 1: a progress bar and the workers' output; 2: more", whole(0)),
    Row("gradient_compression", None, "a compressor such as hvd.Compression.fp16"),
    Row("compress_sparse_cols", False, "no effect: columns of sparse vectors are always stored compactly", values.flag),
    Row("random_seed", None, "seed of the split, the order and the workers; None: derived from run_id", whole(0)),
    Row(
        "shuffle_buffer_size",
        None,
        "no effect: all rows of an epoch are shuffled",
        values.deprecated("all rows of an epoch are shuffled"),
        accessors=("ShufflingBufferSize",),
    ),
    Row("shuffle", True, "shuffle the training rows in each epoch", values.flag),
    Row("partitions_per_process", 10, "Parquet files per worker in the intermediate data", whole(1)),
    Row("run_id", None, "name of the run; one that has a checkpoint is resumed", values.text),
    Row("train_steps_per_epoch", None, "steps of an epoch; None: one pass over the rows", whole(1)),
    Row("validation_steps_per_epoch", None, "the same for validation", whole(1)),
    Row("transformation_fn", None, "fn(row) -> row, applied in the reader; a row is a dict of values", values.function),
    Row(
        "transformation_edit_fields",
        None,
        "what it changes: list of (name, numpy dtype, shape, is nullable)",
        values.items,
    ),
    Row("transformation_removed_fields", None, "columns that transformation_fn removes", values.column_names),
    *PREPROCESS_ROWS,
    Row(
        "train_reader_num_workers",
        2,
        "reader threads",
        whole(1),
        accessors=("TrainReaderNumWorker", "TrainReaderNumWorkers"),
    ),
    Row(
        "val_reader_num_workers",
        2,
        "the same for validation",
        whole(1),
        accessors=("ValReaderNumWorker", "ValReaderNumWorkers"),
    ),
    Row("tensorflow_dataset_prefetch_buffer_size", 0, "batches that tf.data prefetches; 0 lets it choose", whole(0)),
    Row(
        "reader_pool_type",
        "thread",
        "where data is read; 'dummy': in a single thread",
        values.one_of("thread", "process", "dummy"),
    ),
    Row("label_shapes", None, "shape of each label column's batch; None: the output's", values.shapes),
    Row(
        "inmemory_cache_all",
        False,
        "keep rows in memory once they are read",
        values.flag,
        accessors=("InMemoryCacheAll",),
    ),
    Row("use_gpu", True, "train on the worker's own GPU, if all workers have one", values.flag),
    Row(
        "mp_start_method",
        None,
        "multiprocessing's start method in the workers",
        values.one_of("fork", "spawn", "forkserver"),
    ),
    Row("backward_passes_per_step", 1, "batches per step; their gradients are averaged", whole(1)),
    Row("scale_lr", True, "multiply the learning rate by the number of workers", values.flag),
    Row("data_module", None, "a DataModule subclass that reads the data", values.function),
    Row("terminate_on_nan", True, "end the fit with an error when the loss or the weights are not finite", values.flag),
    Row("max_restarts", 3, "how often workers are started again after one of them died", whole(0)),
    Row("checkpoint_every_epochs", 1, "epochs between two checkpoints", whole(1)),
    Row("checkpoint_every_steps", None, "steps between two checkpoints within an epoch; None: none", whole(1)),
    Row("output_cols", None, "columns that the model adds", values.column_names, alias="predictionCol"),
    Row("output_kinds", None, "the form of each of these columns; see the model's output_kinds", values.output_kinds),
    Row("mlflow", None, "True or the name of an experiment: log params, metrics and model to MLflow", values.tracking),
)

#: Params of TorchEstimator and LightningEstimator.
INPUT_SHAPES = Row(
    "input_shapes", None, "shape of each feature column's batch, -1 for the rows; None: as stored", values.shapes
)
OUTPUT_FN = Row(
    "output_fn", None, "fn(the model's output) -> what the loss, metrics and transform get of it", values.function
)
TORCH_BACKEND = Row(
    "torch_backend", None, "backend of torch.distributed's default group in the workers, such as 'hvd'", values.text
)
SHARDING = Row("sharding", "none", "what workers hold a part of only: 'zero1', 'fsdp2' or FSDP2(...)", values.sharding)
COMMUNICATION = Row(
    "communication",
    "every_step",
    "what workers exchange, and when: 'every_step', PowerSGD(...), LocalSGD(...), DiLoCo(...)",
    values.communication,
)

#: Further params of TorchEstimator.
TORCH_ROWS = (
    INPUT_SHAPES,
    OUTPUT_FN,
    Row("loss_constructors", None, "function without arguments that makes the loss, or a list", values.functions),
    Row("train_minibatch_fn", None, "replaces a training step", values.function),
    Row("validation_minibatch_fn", None, "replaces a validation step", values.function),
    Row("lr_scheduler", None, "fn(optimizer) -> a scheduler of torch.optim.lr_scheduler", values.function),
    Row(
        "lr_scheduler_interval",
        "epoch",
        "how often the scheduler is stepped: 'epoch' or 'step'",
        values.one_of("epoch", "step"),
    ),
    Row("gradient_clip_norm", None, "upper bound of the norm over all gradients", values.positive),
    Row("gradient_clip_value", None, "upper bound of the absolute value of each gradient element", values.positive),
    TORCH_BACKEND,
    SHARDING,
    COMMUNICATION,
    Row("mixed_precision", None, "'bf16' or 'fp16' for the forward pass", values.one_of("bf16", "fp16")),
    Row("class_weights", None, "'balanced', or a dict label -> weight of its rows' loss", values.class_weights),
    Row(
        "early_stopping",
        None,
        "EarlyStopping(...), or the number of epochs without a better loss that end the fit",
        values.stopping,
    ),
    Row("return_best", False, "return the weights of the best epoch, not of the last", values.flag),
)

#: Params of every fitted model.
MODEL_ROWS = (
    Row("history", None, "one record for each epoch", attribute="_history"),
    Row("model", None, "the trained model"),
    Row("feature_columns", None, "columns that go into the model", values.column_names, alias="featuresCol"),
    Row(
        "label_columns",
        None,
        "label columns that it was trained on",
        values.column_names,
        setters=("LabelColoumns", "LabelColumns"),
        alias="labelCol",
    ),
    Row(
        "output_cols",
        None,
        "columns that transform adds; None: <label>__output",
        values.column_names,
        alias="predictionCol",
        param="outputCols",
    ),
    Row(
        "output_kinds",
        None,
        "form of each: 'plain', 'vector', 'array', 'probability', 'argmax' or 'columns'; several of one output",
        values.output_kinds,
    ),
    Row("batch_size", 1024, "rows that transform scores at once", whole(1)),
    Row("transformation_fn", None, "fn(row) -> row that transform applies; a fit does not set it", values.function),
    *PREPROCESS_ROWS,
    Row("run_id", None, "the run that made the model", values.text),
    Row("_metadata", None, "columns, shapes and dtypes that the model takes and returns", setters=("_Metadata",)),
)

#: Further params of TorchModel.
TORCH_MODEL_ROWS = (
    Row("optimizer", None, "the optimizer after training"),
    Row("loss", None, "the loss that it was trained with"),
    Row("loss_constructors", None, "functions that made the loss"),
    Row("output_fn", None, "fn(the model's output) -> a tensor, or several, that transform stores", values.function),
    Row("input_shapes", None, "shape of each feature column's batch", values.shapes),
    Row("model_factory", None, "what made the model without its trained weights; None if it was given as a module"),
)


def with_params(*tables: Iterable[Row]) -> Callable[[C], C]:
    """Class decorator: rows become Params, accessors, the signature and docstring."""
    rows = {row.name: row for table in tables for row in table}

    def decorate(cls: C) -> C:
        namespace: Any = cls
        namespace.param_rows = rows
        namespace.param_keywords = {row.param_name: row.name for row in rows.values()}
        namespace.param_aliases = {row.alias: row.name for row in rows.values() if row.alias}
        accessors = namespace.alias_accessors = {}
        for row in rows.values():
            setattr(cls, row.key, Param(Params._dummy(), row.param_name, row.doc, typeConverter=row.convert))
            if row.param:
                setattr(cls, row.name, property(operator.attrgetter(row.key)))
            camel = "".join(part.capitalize() for part in row.name.strip("_").split("_"))
            for name in row.setters or row.accessors or (camel,):
                _define(cls, f"set{name}", _setter(row))
            for name in row.accessors or (camel,):
                _define(cls, f"get{name}", _getter(row))
            if alias := row.alias:
                accessors[f"set{alias[0].upper()}{alias[1:]}"] = _setter(row)
                accessors[f"get{alias[0].upper()}{alias[1:]}"] = _single_getter(row)
        keywords = [
            inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default) for row in rows.values()
        ]
        namespace.__signature__ = inspect.Signature(keywords)
        lines = [f"    {row.name} ({row.default!r}): {row.doc}" for row in rows.values()]
        cls.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), "", "Params, all keyword-only (default):", *lines, ""])
        return cls

    return decorate


def _define(cls: type, name: str, method: Callable[..., Any]) -> None:
    found = getattr(cls, name, None)
    if found is not None and not getattr(found, "is_generated", False):
        return  # a method that a class or its base defines stays
    method.__name__ = name
    method.__qualname__ = f"{cls.__qualname__}.{name}"
    vars(method)["is_generated"] = True
    setattr(cls, name, method)


def _setter(row: Row) -> Callable[..., Any]:
    def setter(self: Any, value: Any) -> Any:
        return self._set(**{row.name: value})

    setter.__doc__ = f"Set ``{row.name}``: {row.doc}. Returns self."
    return setter


def _getter(row: Row) -> Callable[..., Any]:
    def getter(self: Any) -> Any:
        return self.getOrDefault(getattr(self, row.key))

    getter.__doc__ = f"``{row.name}``: {row.doc}."
    return getter


def _single_getter(row: Row) -> Callable[..., Any]:
    def getter(self: Any) -> Any:
        value = self.getOrDefault(getattr(self, row.key))
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    getter.__doc__ = f"``{row.name}``: {row.doc}; a list only if there are several."
    return getter


@with_params(ESTIMATOR_ROWS)
class EstimatorParams(PipelineStage):
    """The params of every estimator, for programs that write their own estimator."""


@with_params(MODEL_ROWS)
class ModelParams(PipelineStage):
    """The params of every fitted model."""
