"""Readers of the user's own: what ``data_module=`` takes, under Horovod's names and arguments."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.readers import Readers, RepeatedRow, one_pass, options_of_pool, rows_of

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec, Inputs


class DataModule(ABC):
    """Base of data modules; an estimator makes one in each worker, enters it as a context, and iterates.

    A batch is a dict column -> array or tensor of shape (rows, ...), or a pair ``(features, labels)``: a dict of the
    feature columns, and a dict or a sequence of the labels.

    Args:
        train_dir, val_dir: paths or URLs of folders that hold exactly the training and the validation rows, as Parquet.
        num_train_epochs: epochs of the fit.
        has_val: whether there is validation data.
        train_batch_size, val_batch_size: rows of a batch, per worker.
        shuffle: whether to permute the training rows.
        transform_fn: the estimator's ``transformation_fn``.
        inmemory_cache_all: whether to keep what was read in memory.
        cur_shard, shard_count: this rank, and the number of ranks.
        schema_fields: names of the columns that are needed.
        storage_options: arguments for the filesystem of the URLs.
        steps_per_epoch_train, steps_per_epoch_val: batches of an epoch, the same on every rank.
        verbose: whether to say what happens.
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
        """The training batches, epoch after epoch without an end; or those of one epoch, to be asked for again."""

    @abstractmethod
    def val_data(self) -> Iterable[Any] | None:
        """The validation batches of one epoch."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:  # noqa: B027 - most have nothing open
        """Let go of what is open."""


class PetastormDataModule(DataModule):
    """The reader of this package as a data module, under the name that Horovod's users subclass."""

    short_name = "petastorm"
    _validation: ParquetReader | None = None

    def train_data(self) -> Iterable[Any]:
        reader = self._train_reader()
        return itertools.chain.from_iterable(self._pass(reader, epoch) for epoch in itertools.count())

    def val_data(self) -> Iterable[Any] | None:
        if not self.has_val or self.val_dir is None:
            return None
        return self._pass(self._val_reader("partial"), 0)

    def _train_reader(self) -> ParquetReader:
        return self._reader(self.train_dir, "train", self.train_batch_size, shuffle=self.shuffle, remainder="pad")

    def _val_reader(self, remainder: Any) -> ParquetReader:
        if self._validation is None:  # kept, and with it the rows that it keeps in memory
            self._validation = self._reader(
                str(self.val_dir), "val", self.val_batch_size, shuffle=False, remainder=remainder
            )
        return self._validation

    def _reader(self, path: str, part: str, batch_size: int, **options: Any) -> ParquetReader:
        num_threads = self.kwargs.get(f"{part}_reader_worker_count", 2)
        return ParquetReader(
            path,
            self.schema_fields,
            batch_size=batch_size,
            rank=self.cur_shard,
            size=self.shard_count,
            seed=self.kwargs.get("seed", 0),
            transformation_fn=self.transform_fn,
            storage_options=self.storage_options,
            **options_of_pool(self._pool_type, num_threads, self.inmemory_cache_all),
            **options,
        )

    @property
    def _pool_type(self) -> str:
        return str(self.kwargs.get("reader_pool_type", "thread"))

    def _pass(self, reader: ParquetReader, epoch: int) -> Iterator[Any]:
        return one_pass(
            reader,
            epoch,
            0,
            self._pool_type,
            self.kwargs.get("mp_start_method"),
            seed=self.kwargs.get("seed", 0),
            rank=self.cur_shard,
        )


class NVTabularDataModule(DataModule):
    """Always raises: NVTabular is not supported.

    Raises:
        NotImplementedError: names what takes its place.
    """

    short_name = "nvtabular"

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "NVTabularDataModule is not supported: leave data_module out and name the continuous and the categorical "
            "columns in feature_cols (categories as integers, for embeddings), or subclass "
            "horovod.spark.common.datamodule.DataModule around a loader of NVTabular's successor, Merlin"
        )


def arguments(spec: FitSpec, rank: int, size: int, train_steps: int, val_steps: int) -> dict[str, Any]:
    """What a data module is made with on one rank."""
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
    """Batches of a training and of a validation epoch, the same on every rank."""
    data = spec.dataset
    held_out = data.validation.rows if data.validation is not None else 0
    return (
        spec.train_steps_per_epoch or max(1, data.train.rows // (spec.batch_size * size)),
        spec.validation_steps_per_epoch or -(-held_out // (spec.val_batch_size * size)),
    )


class DataModuleReaders(Readers):
    """Batches of a data module, made into what workers train on.

    A run that goes on from a checkpoint skips the batches that it has seen, by taking them.
    """

    def __init__(self, spec: FitSpec, rank: int, size: int) -> None:
        self._inputs: Inputs = spec.inputs
        self._size = size
        self.train_steps, self._val_steps = steps_of(spec, size)
        self.padding_rows = 0
        self._module = spec.data_module(**arguments(spec, rank, size, self.train_steps, self._val_steps))
        self._train: Iterator[Any] = iter(())
        #: Training batches that have been taken, over all epochs.
        self._taken = 0

    def __enter__(self) -> DataModuleReaders:
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(self._module)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._opened.__exit__(*exc_info)  # what it answers counts nothing: a failure stays one

    def train_batches(self, epoch: int, done: int = 0) -> Iterator[dict[str, Tensor]]:
        first = epoch * self.train_steps + done
        for _ in range(first - self._taken):
            self._next()
        for _ in range(self.train_steps - done):
            yield self._as_batch(self._next())

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        mine = self._validation()
        yield from _as_many(mine) if self._size > 1 else mine

    def _validation(self) -> Iterator[dict[str, Tensor]]:
        batches = self._module.val_data()
        if batches is not None:
            for batch in itertools.islice(iter(batches), self._val_steps):
                tensors = self._as_batch(batch)
                if rows_of(tensors):
                    yield tensors

    def _next(self) -> Any:
        """The next training batch; data that ends is asked for again."""
        self._taken += 1
        for _ in range(2):
            batch = next(self._train, None)
            if batch is not None:
                return batch
            self._train = iter(self._module.train_data())
        raise DataError(f"{type(self._module).__name__}.train_data() gives no batches")

    def _as_batch(self, batch: Any) -> dict[str, Tensor]:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            features, labels = batch
            if not isinstance(labels, Mapping):
                listed = labels if isinstance(labels, (list, tuple)) else [labels]
                labels = dict(zip(self._inputs.label_cols, listed, strict=True))
            batch = {**features, **labels}
        if not isinstance(batch, Mapping):
            raise DataError(
                f"{type(self._module).__name__} gave a batch of type {type(batch).__name__}: it must be a dict column "
                "-> array, or a pair of such a dict and the labels"
            )
        return {name: _as_tensor(value) for name, value in batch.items()}


def _as_many(batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Equally many batches on every rank: one that has no more gets a :class:`RepeatedRow`. Every rank takes part.

    How many batches a module of the user's own gives is not known in advance.
    """
    import hvd_cluster.torch as hvd

    batch = next(batches, None)
    rows = hvd.allgather_object(None if batch is None else _first_row(batch), name="hvd_cluster.validation_rows")
    spare = next((row for row in rows if row is not None), None)
    while spare is not None:
        spare = spare if batch is None else _first_row(batch)
        yield RepeatedRow(spare) if batch is None else batch
        batch = next(batches, None)
        goes_on = hvd.allreduce(
            torch.tensor([float(batch is not None)]), op=hvd.Max, name="hvd_cluster.validation_goes_on"
        )
        if not goes_on.item():
            return


def _first_row(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: column[:1].clone() for name, column in batch.items()}  # a view would be sent with all rows


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
