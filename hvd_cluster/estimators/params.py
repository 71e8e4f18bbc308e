"""The params of all estimators and models: one table each, and the accessors made from it.

Horovod's names, defaults and accessor spellings are public and stay, odd ones included.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hvd_cluster.estimators import values
from hvd_cluster.estimators.stages.param_row import Row
from hvd_cluster.estimators.stages.spark_ml import Param, Params
from hvd_cluster.estimators.stages.stage import Stage
from hvd_cluster.estimators.values import whole

C = TypeVar("C", bound=type)


#: Params that every estimator has.
ESTIMATOR_ROWS = (
    Row("num_proc", None, "number of workers; None: all slots of the Spark session, or 1 for local data", whole(1)),
    Row("store", None, "folder or Store for intermediate data, checkpoints and logs"),
    Row("backend", None, "what runs the workers, instead of num_proc; see hvd_cluster.estimators.Backend", saved=False),
    Row("model", None, "the model to train; the one given is left as it is"),
    Row("optimizer", None, "optimizer over the model's parameters"),
    Row("loss", None, "fn(output, label) -> scalar, or a list with one for each label column", values.functions),
    Row(
        "metrics",
        [],
        "list or dict of fn(output, label) -> number, or of lists with one for each label",
        values.metrics,
    ),
    Row("loss_weights", None, "weight of each label column's loss; None: equal weights of sum 1", values.numbers),
    Row("sample_weight_col", None, "column with the weight of each row's loss", values.text, aliases=("weightCol",)),
    Row(
        "feature_cols",
        None,
        "columns that go into the model, in its order; None: all others",
        values.column_names,
        aliases=("featuresCol",),
    ),
    Row(
        "label_cols",
        None,
        "columns that the outputs are compared with, in their order",
        values.column_names,
        aliases=("labelCol",),
    ),
    Row("continuous_cols", None, "handed to data_module", values.column_names),
    Row("categorical_cols", None, "handed to data_module", values.column_names),
    Row(
        "validation",
        None,
        "share of the rows, or the column that marks them (True or > 0)",
        values.share_or_column,
        aliases=("validationIndicatorCol",),
    ),
    Row("callbacks", [], "list of fn(record, model), called on every rank after each epoch", values.items),
    Row("driver_callbacks", [], "list of fn(record), called in the driver after each epoch", values.callables),
    Row("batch_size", 32, "rows of a training batch, per worker", whole(1), optional=False),
    Row("val_batch_size", None, "rows of a validation batch, per worker; None: batch_size", whole(1)),
    Row("epochs", 1, "how often the training rows are gone through", whole(1), optional=False),
    Row("verbose", 1, "0: silent; 1: a progress bar and the workers' output; 2: more", whole(0), optional=False),
    Row("gradient_compression", None, "a compressor such as hvd.Compression.fp16"),
    Row(
        "compress_sparse_cols",
        False,
        "no effect: columns of sparse vectors are always stored compactly",
        values.flag,
        optional=False,
    ),
    Row("random_seed", None, "seed of the split, the order and the workers; None: from run_id", whole(0)),
    Row(
        "shuffle_buffer_size",
        None,
        "no effect any more",
        values.deprecated("all rows of an epoch are shuffled"),
        setters=("ShufflingBufferSize",),
        getters=("ShufflingBufferSize",),
    ),
    Row("shuffle", True, "a new order of the training rows in each epoch", values.flag, optional=False),
    Row("partitions_per_process", 10, "Parquet files per worker in the intermediate data", whole(1), optional=False),
    Row("run_id", None, "name of the run; one that has a checkpoint is resumed", values.text),
    Row("train_steps_per_epoch", None, "steps of an epoch; None: once through the rows", whole(1)),
    Row("validation_steps_per_epoch", None, "the same for validation", whole(1)),
    Row("transformation_fn", None, "fn(row) -> row, applied in the reader; a row is a dict of values", values.function),
    Row(
        "transformation_edit_fields",
        None,
        "what transformation_fn changes: list of (name, numpy dtype, shape, is nullable)",
        values.items,
    ),
    Row("transformation_removed_fields", None, "columns that transformation_fn takes away", values.column_names),
    Row(
        "train_reader_num_workers",
        2,
        "reader threads",
        whole(1),
        optional=False,
        setters=("TrainReaderNumWorker", "TrainReaderNumWorkers"),
        getters=("TrainReaderNumWorker", "TrainReaderNumWorkers"),
    ),
    Row(
        "val_reader_num_workers",
        2,
        "the same for validation",
        whole(1),
        optional=False,
        setters=("ValReaderNumWorker", "ValReaderNumWorkers"),
        getters=("ValReaderNumWorker", "ValReaderNumWorkers"),
    ),
    Row(
        "tensorflow_dataset_prefetch_buffer_size",
        0,
        "batches that tf.data takes in advance, where Keras runs on TensorFlow; 0 lets it choose",
        whole(0),
        optional=False,
    ),
    Row(
        "reader_pool_type",
        "thread",
        "where data is read: threads of the worker, a process beside it, or one thread ('dummy')",
        values.one_of("thread", "process", "dummy"),
        optional=False,
    ),
    Row("label_shapes", None, "shape of each label column's batch; None: the output's", values.shapes),
    Row(
        "inmemory_cache_all",
        False,
        "keep the rows in memory after they were read",
        values.flag,
        optional=False,
        setters=("InMemoryCacheAll",),
        getters=("InMemoryCacheAll",),
    ),
    Row("use_gpu", True, "train on the worker's own GPU, where all workers have one", values.flag, optional=False),
    Row("mp_start_method", None, "of multiprocessing, in the workers", values.one_of("fork", "spawn", "forkserver")),
    Row(
        "backward_passes_per_step",
        1,
        "batches of one step; the gradients are averaged over them",
        whole(1),
        optional=False,
    ),
    Row("scale_lr", True, "multiply the learning rate by the number of workers", values.flag, optional=False),
    Row("data_module", None, "a DataModule class of the user's own, which reads the data", values.function),
    Row(
        "terminate_on_nan",
        True,
        "end the fit with an error when the loss or the weights are not finite numbers",
        values.flag,
        optional=False,
    ),
    Row("max_restarts", 3, "how often workers start again after one of them died", whole(0), optional=False),
    Row("checkpoint_every_epochs", 1, "epochs from one checkpoint to the next", whole(1), optional=False),
    Row("checkpoint_every_steps", None, "steps from one checkpoint to the next within an epoch; None: none", whole(1)),
    Row("output_cols", None, "columns that the model adds", values.column_names, aliases=("predictionCol",)),
    Row("output_kinds", None, "the form of each of them; see the model's output_kinds", values.output_kinds),
    Row("mlflow", None, "True or the name of an experiment: keep params, metrics and model in MLflow", values.tracking),
)

#: Params of TorchEstimator beside those.
TORCH_ROWS = (
    Row("input_shapes", None, "shape of each feature column's batch, -1 for the rows; None: as stored", values.shapes),
    Row(
        "loss_constructors", None, "function without arguments that makes the loss, or a list of them", values.functions
    ),
    Row("train_minibatch_fn", None, "one training step of the user's own", values.function),
    Row("validation_minibatch_fn", None, "one validation step of the user's own", values.function),
    Row("lr_scheduler", None, "fn(optimizer) -> a scheduler of torch.optim.lr_scheduler", values.function),
    Row(
        "lr_scheduler_interval",
        "epoch",
        "how often it moves: 'epoch' or 'step'",
        values.one_of("epoch", "step"),
        optional=False,
    ),
    Row("gradient_clip_norm", None, "bound of the norm of all gradients together", values.positive),
    Row("gradient_clip_value", None, "bound of each element of a gradient", values.positive),
    Row("mixed_precision", None, "'bf16' or 'fp16' for the forward pass", values.one_of("bf16", "fp16")),
    Row("class_weights", None, "'balanced', or a dict label -> weight of its rows' loss", values.class_weights),
    Row("early_stopping", None, "EarlyStopping(...), or the number of epochs without a better loss", values.stopping),
    Row("return_best", False, "return the weights of the best epoch, not of the last", values.flag, optional=False),
)

#: Params of every fitted model.
MODEL_ROWS = (
    Row("history", None, "one record for each epoch", attribute="_history"),
    Row("model", None, "the trained model"),
    Row("feature_columns", None, "columns that go into the model", values.column_names, aliases=("featuresCol",)),
    Row(
        "label_columns",
        None,
        "columns that it was trained on",
        values.column_names,
        setters=("LabelColoumns", "LabelColumns"),  # the first is Horovod's spelling
        aliases=("labelCol",),
    ),
    Row(
        "output_cols",
        None,
        "columns that transform adds; None: <label>__output",
        values.column_names,
        aliases=("predictionCol",),
        param="outputCols",
    ),
    Row(
        "output_kinds",
        None,
        "form of each: 'plain', 'vector', 'array', 'probability', 'argmax' or 'columns'; several of one output",
        values.output_kinds,
    ),
    Row("batch_size", 1024, "rows that transform scores at once", whole(1), optional=False),
    Row("run_id", None, "the run that made the model", values.text),
    Row(
        "_metadata", None, "schema of the training data, shapes and dtypes at the model's edge", setters=("_Metadata",)
    ),
)

#: Params of TorchModel beside those.
TORCH_MODEL_ROWS = (
    Row("optimizer", None, "the optimizer after training"),
    Row("loss", None, "the loss that it was trained with"),
    Row("loss_constructors", None, "what made the loss"),
    Row("input_shapes", None, "shape of each feature column's batch", values.shapes),
)


def with_params(*tables: Iterable[Row]) -> Callable[[C], C]:
    """Class decorator: the rows become Params, accessors, the constructor's signature and part of the docstring."""
    rows = {row.name: row for table in tables for row in table}

    def decorate(cls: C) -> C:
        namespace: Any = cls
        namespace.param_rows = rows
        namespace.param_keywords = {row.param_name: row.name for row in rows.values()}
        namespace.param_aliases = {alias: row.name for row in rows.values() for alias in row.aliases}
        accessors = namespace.alias_accessors = {}
        for row in rows.values():
            setattr(cls, row.key, Param(Params._dummy(), row.param_name, row.doc, typeConverter=row.convert))
            if row.param:
                setattr(cls, row.name, property(operator.attrgetter(row.key)))
            camel = "".join(part.capitalize() for part in row.name.strip("_").split("_"))
            for name in row.setters or (camel,):
                _define(cls, f"set{name}", _setter(row))
            for name in row.getters or (camel,):
                _define(cls, f"get{name}", _getter(row))
            for alias in row.aliases:
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
        return  # what a class or a base of it writes by hand stays
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

    getter.__doc__ = f"``{row.name}``: {row.doc}; a list only where there are several."
    return getter


@with_params(ESTIMATOR_ROWS)
class EstimatorParams(Stage):
    """The params that every estimator has, for programs that build an estimator of their own."""


@with_params(MODEL_ROWS)
class ModelParams(Stage):
    """The params that every fitted model has."""
