"""The batches that one rank trains and validates on, epoch by epoch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run import random_state
from hvd_cluster.estimators.run.data_module import arguments, steps_of
from hvd_cluster.estimators.run.finite_check import not_finite_text
from hvd_cluster.estimators.run.reader_pool import PassReader, batches_from, in_pool, options_of_pool, start_method_of

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_cluster.data.dataset import Split
    from hvd_cluster.estimators.spec import FitSpec, Inputs


class RepeatedRow(dict[str, Any]):
    """A row of another batch, for a validation batch without rows on this rank.

    It does not count in means.
    """

    #: Rows of that batch on which ``preprocess`` failed.
    num_left_out = 0


def rows_of(batch: Any) -> int:
    """The number of rows of a batch that count in means."""
    return 0 if isinstance(batch, RepeatedRow) or not batch else len(next(iter(batch.values())))


class Readers(ABC):
    """Training and validation batches of one rank; a context manager."""

    #: Steps of a training epoch, the same on every rank.
    train_steps: int
    #: Rows that are repeated in each epoch, over all ranks, to fill the last global batch.
    padding_rows: int
    #: Batches with rows that this rank has in a validation; None if that is unknown.
    num_validated: int | None = None
    #: The next batch may be taken while one is trained on, in another thread.
    ahead: bool = True

    @staticmethod
    def of(spec: FitSpec, rank: int, size: int) -> Readers:
        """The readers of the data module of ``spec``, or of its Parquet files."""
        if spec.data_module is not None:
            return DataModuleReaders(spec, rank, size)
        return ParquetReaders(spec, rank, size)

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *exc_info: Any) -> None:  # noqa: B027 - optional
        """Release resources."""

    @abstractmethod
    def train_batches(self, epoch: int, done: int = 0) -> Iterator[dict[str, Tensor]]:
        """The ``train_steps`` batches of an epoch, without the first ``done``."""

    def not_finite(self, epoch: int, step: int) -> str | None:
        """The columns of a batch with NaN or infinities; empty if none, None if unknown.

        The batch is read once more, which data modules cannot do.
        """
        return None

    @abstractmethod
    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """Validation batches, equally many on all ranks, so metrics may use collectives.

        For those that it has no rows for, a rank gets :class:`RepeatedRow` at the end.
        """


class ParquetReaders(Readers):
    """Batches of a ``ParquetReader``.

    A training epoch has all rows; repeated rows fill the last global batch, so that all batches are full and all ranks
    have the same number. Validation has each row once, in the order of the data.
    """

    def __init__(self, spec: FitSpec, rank: int, size: int) -> None:
        data = spec.dataset
        self._spec = spec
        self._rank = rank
        # A reader process draws new random numbers in each pass, and epochs of a given number of steps end within one.
        has_next = spec.reader_pool_type != "process" and spec.train_steps_per_epoch is None
        self._train_reader = functools.partial(
            self._reader,
            data.train,
            rank,
            size,
            batch_size=spec.batch_size,
            seed=spec.seed,
            shuffle=spec.shuffle,
            remainder="pad",
            training=True,
        )
        self._train = self._train_reader(
            num_threads=spec.train_reader_threads, num_epochs=spec.epochs if has_next else None
        )
        self._validation: PassReader | None = None
        if data.validation is not None:
            self._validation = self._reader(
                data.validation,
                rank,
                size,
                batch_size=spec.val_batch_size,
                shuffle=False,
                remainder="partial",
                num_threads=spec.val_reader_threads,
            )
            if spec.preprocess is None or spec.preprocess.on_error == "raise":
                batches = -(-len(range(rank, data.validation.rows, size)) // spec.val_batch_size)
                most = spec.validation_steps_per_epoch
                self.num_validated = batches if most is None else min(batches, most)
        self.train_steps = spec.train_steps_per_epoch or self._train.steps
        self.padding_rows = self._train.steps * spec.batch_size * size - data.train.rows
        if spec.train_steps_per_epoch is not None:
            self.padding_rows = 0

    def __exit__(self, *exc_info: Any) -> None:
        self._train.close()
        if self._validation is not None:
            self._validation.close()

    def _reader(
        self, split: Split, rank: int, size: int, *, num_threads: int, training: bool = False, **options: Any
    ) -> PassReader:
        spec = self._spec
        preprocess = spec.preprocess
        reader = ParquetReader(
            split,
            spec.dataset.schema,
            spec.dataset.store,
            rank=rank,
            size=size,
            transformation_fn=spec.transformation_fn,
            preprocess=None if preprocess is None else replace(preprocess, training=training, made=spec.inputs.made),
            **options_of_pool(spec.reader_pool_type, num_threads, spec.inmemory_cache_all),
            **options,
        )
        start_method = start_method_of(spec.mp_start_method, spec.dataset)
        return in_pool(reader, spec.reader_pool_type, start_method, seed=spec.seed, rank=self._rank)

    def train_batches(self, epoch: int, done: int = 0) -> Iterator[dict[str, Tensor]]:
        """Batches as in the base class; the next epoch continues an incomplete one."""
        return batches_from(self._train, epoch * self.train_steps + done, self.train_steps - done)

    def not_finite(self, epoch: int, step: int) -> str | None:
        # Another reader: a thread of TensorFlow may be taking batches of this one.
        with contextlib.closing(self._train_reader(num_threads=1)) as reader:
            through, offset = divmod(epoch * self.train_steps + step, reader.steps)
            return not_finite_text(self._spec.inputs, next(iter(reader.epoch(through, offset))))

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        if self._validation is not None:
            batches = itertools.islice(self._validation.epoch(0), self._spec.validation_steps_per_epoch)
            yield from with_rows(batches, self._first_validation_row)

    def _first_validation_row(self) -> dict[str, Tensor]:
        """A row for a rank without any: too few rows, or ``preprocess`` fails on its own."""
        assert self._spec.dataset.validation is not None
        reader = self._reader(
            self._spec.dataset.validation, 0, 1, batch_size=1, shuffle=False, remainder="partial", num_threads=1
        )
        return next(batch for batch in reader.epoch(0) if rows_of(batch))


def with_rows(
    batches: Iterator[dict[str, Tensor]], first_row: Callable[[], dict[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """The batches with rows, then a :class:`RepeatedRow` for each empty one.

    The row is of an earlier batch, or that of ``first_row``.
    """
    seen: dict[str, Tensor] | None = None
    left_out: list[int] = []
    for batch in batches:
        if rows_of(batch):
            seen = batch
            yield batch
        else:
            left_out.append(getattr(batch, "num_left_out", 0))
    for num_left_out in left_out:
        seen = first_row() if seen is None else seen
        repeated = RepeatedRow(_first_row(seen))
        repeated.num_left_out = num_left_out
        yield repeated


class DataModuleReaders(Readers):
    """Batches of a data module, as dicts of tensors.

    A run that resumes from a checkpoint reads and skips the batches that it was trained on. The module has random
    generators of its own for them, so that it draws the same numbers again, whatever the model has drawn.
    """

    #: A loader may draw from the global random generators, which meanwhile must not be the model's.
    ahead = False

    def __init__(self, spec: FitSpec, rank: int, size: int) -> None:
        self._inputs: Inputs = spec.inputs
        self._size = size
        self._own_generators = functools.partial(random_state.set_aside, spec.seed, rank, {})
        self.train_steps, self._val_steps = steps_of(spec, size)
        self.padding_rows = 0
        with self._own_generators():
            self._module = spec.data_module(**arguments(spec, rank, size, self.train_steps, self._val_steps))
        self._train: Iterator[Any] = iter(())
        #: Training batches read so far, over all epochs.
        self._taken = 0

    def __enter__(self) -> DataModuleReaders:
        self._opened = contextlib.ExitStack()
        with self._own_generators():
            self._opened.enter_context(self._module)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._opened.__exit__(*exc_info)  # a module cannot suppress a failure

    def train_batches(self, epoch: int, done: int = 0) -> Iterator[dict[str, Tensor]]:
        while self._taken < epoch * self.train_steps + done:
            self._next()
        for _ in range(self.train_steps - done):
            yield self._as_batch(self._next())

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        mine = self._validation()
        yield from _same_number(mine) if self._size > 1 else mine

    def _validation(self) -> Iterator[dict[str, Tensor]]:
        batches = self._module.val_data()
        if batches is not None:
            for batch in itertools.islice(iter(batches), self._val_steps):
                tensors = self._as_batch(batch)
                if rows_of(tensors):
                    yield tensors

    def _next(self) -> Any:
        """The next training batch; calls ``train_data()`` again when it has ended."""
        self._taken += 1
        with self._own_generators():
            for _ in range(2):
                batch = next(self._train, None)
                if batch is not None:
                    return batch
                self._train = iter(self._module.train_data())
        raise DataError(f"{type(self._module).__name__}.train_data() has no batches")

    def _as_batch(self, batch: Any) -> dict[str, Tensor]:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            features, labels = batch
            if not isinstance(labels, Mapping):
                listed = labels if isinstance(labels, (list, tuple)) else [labels]
                labels = dict(zip(self._inputs.label_cols, listed, strict=True))
            batch = {**features, **labels}
        if not isinstance(batch, Mapping):
            raise DataError(
                f"{type(self._module).__name__} returned a batch of type {type(batch).__name__}: it must be a dict "
                "column -> array, or a pair of such a dict and the labels"
            )
        return {name: _as_tensor(value) for name, value in batch.items()}


def _same_number(batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Equally many batches on every rank, padded by :class:`RepeatedRow`; collective.

    The number of batches of a user's data module is unknown.
    """
    import hvd_cluster.torch as hvd

    batch = next(batches, None)
    rows = hvd.allgather_object(None if batch is None else _first_row(batch), name="hvd_cluster.validation_rows")
    seen = next((row for row in rows if row is not None), None)
    while seen is not None:
        seen = seen if batch is None else batch
        yield RepeatedRow(_first_row(seen)) if batch is None else batch
        batch = next(batches, None)
        has_more = hvd.allreduce(
            torch.tensor([float(batch is not None)]), op=hvd.Max, name="hvd_cluster.validation_has_more"
        )
        if not has_more.item():
            return


def _first_row(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: column[:1].clone() for name, column in batch.items()}  # a view would be sent with all rows


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
