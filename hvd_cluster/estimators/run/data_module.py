"""User-defined readers for ``data_module=``, with Horovod's names and arguments."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.run.reader_pool import PassReader, in_pool, options_of_pool

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


class DataModule(ABC):
    """Base of data modules.

    Each worker creates one, enters it as a context and iterates over its batches. A batch is a dict column -> array or
    tensor of shape (rows, ...), or a pair ``(features, labels)``: a dict of the feature columns, and a dict or a
    sequence of the labels.

    Args:
        train_dir, val_dir: paths or URLs of folders that hold exactly the training and the validation rows, as Parquet.
        num_train_epochs: epochs of the fit.
        has_val: whether there is validation data.
        train_batch_size, val_batch_size: rows of a batch, per worker.
        shuffle: whether to permute the training rows.
        transform_fn: the estimator's ``transformation_fn``.
        inmemory_cache_all: whether to keep rows in memory once they are read.
        cur_shard, shard_count: this rank, and the number of ranks.
        schema_fields: names of the columns to read.
        storage_options: arguments for the filesystem of the URLs.
        steps_per_epoch_train, steps_per_epoch_val: batches of an epoch, the same on every rank.
        verbose: whether to log.
        kwargs: ``seed``, ``label_cols``, ``reader_pool_type``, ``train_reader_worker_count`` and
            ``val_reader_worker_count`` (the estimator's params), ``mp_start_method``, and
            the estimator's ``continuous_cols`` and ``categorical_cols`` if given.
    """

    #: Name for messages.
    short_name: str | None = None

    def __init__(
        self,
        train_dir: str,
        val_dir: str | None = None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Callable[..., Any] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int = 1,
        steps_per_epoch_val: int = 1,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        self.train_dir, self.val_dir = train_dir, val_dir
        self.num_train_epochs, self.has_val = num_train_epochs, has_val
        self.train_batch_size, self.val_batch_size = train_batch_size, val_batch_size
        self.shuffle, self.transform_fn, self.inmemory_cache_all = shuffle, transform_fn, inmemory_cache_all
        self.cur_shard, self.shard_count = cur_shard, shard_count
        self.schema_fields, self.storage_options = schema_fields, storage_options
        self.steps_per_epoch_train, self.steps_per_epoch_val = steps_per_epoch_train, steps_per_epoch_val
        self.verbose = verbose
        self.kwargs = kwargs

    @abstractmethod
    def train_data(self) -> Iterable[Any]:
        """Training batches of one epoch or endless ones; called again when they end.

        Random numbers of torch, NumPy and Python are the same in a resumed fit, except in threads of the module.
        """

    @abstractmethod
    def val_data(self) -> Iterable[Any] | None:
        """The validation batches of one epoch."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:  # noqa: B027 - optional
        """Release resources."""


class PetastormDataModule(DataModule):
    """This package's Parquet reader as a data module, under Horovod's name."""

    short_name = "petastorm"
    _validation: PassReader | None = None

    def train_data(self) -> Iterable[Any]:
        reader = self._train_reader()
        return itertools.chain.from_iterable(reader.epoch(epoch) for epoch in itertools.count())

    def val_data(self) -> Iterable[Any] | None:
        if not self.has_val or self.val_dir is None:
            return None
        return self._val_reader("partial").epoch(0)

    def _train_reader(self) -> PassReader:
        return self._reader(self.train_dir, "train", self.train_batch_size, shuffle=self.shuffle, remainder="pad")

    def _val_reader(self, remainder: Any) -> PassReader:
        if self._validation is None:  # kept for all epochs, with its cached rows
            self._validation = self._reader(
                str(self.val_dir), "val", self.val_batch_size, shuffle=False, remainder=remainder
            )
        return self._validation

    def _reader(self, path: str, part: str, batch_size: int, **options: Any) -> PassReader:
        num_threads = self.kwargs.get(f"{part}_reader_worker_count", 2)
        pool_type = str(self.kwargs.get("reader_pool_type", "thread"))
        seed = self.kwargs.get("seed", 0)
        reader = ParquetReader(
            path,
            self.schema_fields,
            batch_size=batch_size,
            rank=self.cur_shard,
            size=self.shard_count,
            seed=seed,
            transformation_fn=self.transform_fn,
            storage_options=self.storage_options,
            **options_of_pool(pool_type, num_threads, self.inmemory_cache_all),
            **options,
        )
        return in_pool(reader, pool_type, self.kwargs.get("mp_start_method"), seed=seed, rank=self.cur_shard)


class NVTabularDataModule(DataModule):
    """Always raises: NVTabular is not supported.

    Raises:
        NotImplementedError: the text names the replacements.
    """

    short_name = "nvtabular"

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "NVTabularDataModule is not supported: leave data_module out and name the continuous and the categorical "
            "columns in feature_cols (categories as integers, for embeddings), or write a subclass of "
            "horovod.spark.common.datamodule.DataModule that wraps a loader of NVTabular's successor, Merlin"
        )


def arguments(spec: FitSpec, rank: int, size: int, train_steps: int, val_steps: int) -> dict[str, Any]:
    """The keyword arguments of a data module on one rank."""
    data = spec.dataset
    held_out = data.validation.rows if data.validation is not None else 0
    assert spec.part_dirs is not None  # a fit with a data module has them
    train_dir, val_dir = spec.part_dirs
    return {
        "train_dir": train_dir,
        "val_dir": val_dir,
        "num_train_epochs": spec.epochs,
        "has_val": bool(held_out),
        "train_batch_size": spec.batch_size,
        "val_batch_size": spec.val_batch_size,
        "shuffle": spec.shuffle,
        "transform_fn": spec.transformation_fn,
        "inmemory_cache_all": spec.inmemory_cache_all,
        "cur_shard": rank,
        "shard_count": size,
        "schema_fields": list(data.schema.names),
        "storage_options": dict(data.store.storage_options) or None,
        "steps_per_epoch_train": train_steps,
        "steps_per_epoch_val": val_steps,
        "verbose": spec.verbose > 0,
        "seed": spec.seed,
        "label_cols": list(spec.inputs.label_cols),
        "reader_pool_type": spec.reader_pool_type,
        "train_reader_worker_count": spec.train_reader_threads,
        "val_reader_worker_count": spec.val_reader_threads,
        "mp_start_method": spec.mp_start_method,
        **spec.data_module_args,
    }


def steps_of(spec: FitSpec, size: int) -> tuple[int, int]:
    """The number of batches per training and validation epoch, equal on every rank."""
    data = spec.dataset
    held_out = data.validation.rows if data.validation is not None else 0
    return (
        spec.train_steps_per_epoch or max(1, data.train.rows // (spec.batch_size * size)),
        spec.validation_steps_per_epoch or -(-held_out // (spec.val_batch_size * size)),
    )
