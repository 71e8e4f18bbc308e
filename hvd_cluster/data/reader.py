"""Parquet -> batches of tensors in an order of (seed, epoch), from any position."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.reader_config import (
    ColumnConfig,
    OrderConfig,
    PrefetchConfig,
    ReaderOptions,
    overridden,
    share_problems,
)
from hvd_cluster.data.reading import shards
from hvd_cluster.data.reading.batch_mapping import BatchMapping
from hvd_cluster.data.reading.blocks import BlockReader
from hvd_cluster.data.reading.budget import Budget
from hvd_cluster.data.reading.decoding import RawTensor
from hvd_cluster.data.reading.epoch_iterator import EpochIterator
from hvd_cluster.data.reading.position import Planner, Position, fingerprint, position_of_state
from hvd_cluster.data.reading.raw_blocks import RawBlockReader
from hvd_cluster.data.reading.row_form import Batch
from hvd_cluster.data.reading.row_group_reader import RowGroupReader
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.reading.row_transform import RowTransform
from hvd_cluster.data.reading.shards import Remainder
from hvd_cluster.data.reading.source import open_source
from hvd_cluster.data.schema import Schema
from hvd_cluster.data.shard_warning import warn_if_no_batch, warn_if_not_own_shard
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


class ParquetReader(IterableDataset[dict[str, Any]]):
    """Batches of tensors from Parquet files: iterate over it once for each epoch.

    ::

        reader = ParquetReader("s3://bucket/train", ["x", "y"], batch_size=256, rank=hvd.rank(), size=hvd.size())
        for epoch in range(10):
            for batch in reader:
                loss = loss_fn(model(batch["x"]), batch["y"])

    The order of rows is a pure function of the data, the columns, ``seed`` and the epoch (and of ``lanes``): neither
    the number of threads nor the bounds of read-ahead change it, and :mod:`hvd_cluster.data.reading.shards` says how
    ranks share it. ``state_dict()`` returns the position after the last batch that was handed out. A reader that loads
    it continues from there, also with another number of ranks, batch size, or number of threads, without losing or
    repeating a row of the epoch.

    Memory: :attr:`memory_bytes` is the bound. While they wait, rows take at most ``prefetch_bytes``; a window has
    ``window_bytes``, or the size of the largest row group where that is larger. A batch that is kept holds 16 MiB at
    most, or twice its own size where that is more.

    With ``num_epochs``, the reader reads the first rows of an epoch while the last batches of the previous one are
    consumed, and keeps them until the next iteration, :meth:`close`, or its own end.

    Wrap it in ``torch.utils.data.DataLoader(reader, batch_size=None)`` for ``pin_memory``; leave ``num_workers`` at 0,
    since the reader has its own threads. Every tensor has ``__dlpack__``: TensorFlow and CuPy use it without a copy,
    and so does JAX where rows begin at a multiple of 64 bytes (it converts 64 bits to 32 without ``jax_enable_x64``).

    Args:
        source: path or URL of a Parquet file or folder, a list of these, or a :class:`Dataset` (its training part is
            read). Folders named ``key=value`` are columns. A :class:`Split` is read with its ``Schema`` as ``columns``
            and its ``Store`` as ``filesystem``. Also a Delta, Iceberg or Lance table, as
            :func:`~hvd_cluster.data.tables.opening.open_table` takes it; several ranks are given what that returned,
            so that all read one snapshot.
        columns: the columns to read; None for all.
        filesystem: a pyarrow or fsspec filesystem in which ``source`` is a path, or a ``Store``; None uses the URL.
        batch_size: rows per rank and step.
        rank, size: this rank, and the number of ranks; 0 and 1 by default, with a warning in a worker of several.
        epoch: number of the first epoch, any integer.
        num_epochs: epochs to read, starting at ``epoch``. It only limits how far the reader reads ahead. None does not
            read beyond an epoch.
        remainder: what happens to the rows that do not fill the last global batch: "drop" leaves them out, "pad" fills
            the batch with rows seen before, "partial" yields smaller, possibly empty batches, "uneven" does the same
            without the empty ones, so that some ranks have one step less (and call ``hvd.join``).
        filters: which rows to read: a list of ``(column, operator, value)``, or of such lists, of which one must hold;
            see :func:`hvd_cluster.data.filters.parse`. Row groups that their statistics rule out are not read. Each
            rank counts the matching rows when the reader is made.
        transformation_fn: function from row (dict of NumPy scalars, arrays, str, bytes) to row (dict of numbers, arrays
            or tensors), run in the reader's threads; the columns of the first row it returns become the batches'
            columns.
        preprocess: function from a batch of some columns, of any type and with nulls, to tensors of any names, run in
            threads of the reader. What it draws from its generator depends on seed, epoch, rank and row only.
        arrays: "torch" for tensors, "numpy" for arrays, in the batches that iteration yields.
        storage_options: arguments for the fsspec filesystem of the URL, such as credentials.
        column_config: shapes, padding, nulls and decoding of columns, and which of them form one tensor.
        order_config: shuffling, seed, window and lanes.
        prefetch_config: threads, memory bound and cache.
        options: single fields of the three configs, such as ``seed=7``; they override the config's own.

    Raises:
        DataError: there is no data, a file is damaged, a column is missing or cannot be a tensor, or arguments
            contradict each other.
    """

    def __init__(
        self,
        source: Any,
        columns: Sequence[str] | Schema | None = None,
        filesystem: Any = None,
        *,
        batch_size: int,
        rank: int | None = None,
        size: int | None = None,
        epoch: int = 0,
        num_epochs: int | None = None,
        remainder: Remainder = "drop",
        filters: Any = None,
        transformation_fn: RowTransform | None = None,
        preprocess: Preprocess | None = None,
        arrays: Literal["torch", "numpy"] = "torch",
        storage_options: Mapping[str, Any] | None = None,
        column_config: ColumnConfig | None = None,
        order_config: OrderConfig | None = None,
        prefetch_config: PrefetchConfig | None = None,
        **options: Unpack[ReaderOptions],
    ) -> None:
        if rank is None and size is None:
            warn_if_not_own_shard(logger, 0, 1, "rank=hvd.rank(), size=hvd.size(), or rank=0, size=1 if all read all")
        rank, size = rank or 0, 1 if size is None else size
        given: dict[str, Any] = dict(options)
        rules = overridden(column_config or ColumnConfig(), given)
        order = overridden(order_config or OrderConfig(), given)
        prefetch = overridden(prefetch_config or PrefetchConfig(), given)
        if given:
            raise TypeError(f"ParquetReader has no argument {', '.join(map(repr, given))}")
        problems = share_problems(batch_size, rank, size, epoch, remainder)
        if arrays not in {"torch", "numpy"}:
            problems.append(f"arrays is {arrays!r}: it is 'torch' or 'numpy'")
        problems += [*order.problems(), *prefetch.problems()]
        if problems:
            raise DataError("\n".join(problems))
        opened = open_source(
            source,
            columns,
            filesystem,
            rules,
            lanes=order.lanes,
            size=size,
            filters=filters,
            storage_options=storage_options,
            raw=() if preprocess is None else preprocess.raw,
        )
        if preprocess is not None and (transformation_fn is not None or rules.decode or rules.stack):
            raise DataError("preprocess takes the place of transformation_fn, decode and stack: leave these out")
        made = rules.decode if preprocess is None else preprocess.raw
        as_stored = Schema(tuple(column for column in opened.schema if column.name not in made))
        if transformation_fn is None:
            as_stored.require_tensors()
        raw = {name for name, function in rules.decode.items() if isinstance(function, RawTensor)}
        tables = RowGroupTables(
            opened.reader,
            opened.schema.names,
            opened.split.row_filter,
            prefetch.cache,
            texts=opened.texts - raw,
            snapshot=opened.split.snapshot,
        )
        self._fragments, self._split = opened.reader, opened.split
        self._footers, self._input = opened.footers, opened.schema
        rows = RowGroupReader(tables, opened.schema, rules)
        self._blocks: BlockReader | RawBlockReader = BlockReader(
            opened.split, rows, opened.schema, rules, transformation_fn
        )
        self._mapping: BatchMapping | None = None
        if preprocess is not None:
            self._blocks = RawBlockReader(opened.split, rows, opened.schema)
            self._mapping = BatchMapping(preprocess, self._blocks, as_stored, order.seed, rank, prefetch.num_threads)
        self._batch_size = batch_size
        self._rank, self._size = rank, size
        self._order = order
        self._prefetch = prefetch
        self._remainder = remainder
        self._arrays = arrays
        #: Epochs below this one will be asked for.
        self._end_epoch = None if num_epochs is None else epoch + num_epochs
        #: Where the current iteration began, its plan, and how many steps of it have been handed out.
        self._position = Position(epoch=epoch)
        self._plan_taken: shards.ShardPlan | None = None
        self._steps_taken = 0
        self._times_closed = 0
        #: Iterations that have not ended.
        self._open: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        if remainder == "drop":
            warn_if_no_batch(logger, self.rows, batch_size, size, self.steps)

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self._split.rows

    @property
    def steps(self) -> int:
        """Batches per epoch, the same on every rank; with "uneven", those of this rank."""
        if self._remainder == "uneven":
            return -(-len(range(self._rank, self.rows, self._size)) // self._batch_size)
        return shards.num_steps(self.rows, self._batch_size, self._size, self._remainder)

    def __len__(self) -> int:
        return self.steps

    @property
    def schema(self) -> Schema:
        """The columns of the batches.

        What functions make is learned from the data's first row. With ``preprocess`` it is the columns that are read.

        Raises:
            DataError: the first row cannot be read, decoded or transformed.
        """
        return self._blocks.schema

    @property
    def memory_bytes(self) -> int:
        """A bound of the memory that an epoch takes without a cache, in bytes.

        It covers rows that wait, and windows in use and in decoding. Rows count as they are in batches, or as Arrow
        data where that is more; text as it is stored. For each thread there is a chunk (of CHUNK_BYTES, or a row group)
        in three forms: bytes of the file, Arrow, tensors; for each lane of this rank there are two windows, and for
        each thread the order of one. Batches are copied out of them, some files' footers are kept, and every thread's
        allocator may keep a little of what was freed. What functions of yours allocate is not counted.
        """
        return self._epochs.budget.total_bytes(self._split, self._footers, self.plan(0).num_slots, self._batch_size)

    def __getstate__(self) -> dict[str, Any]:
        """Iterations are not pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _open=weakref.WeakSet())

    # --- iteration --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """What comes next: the position after the last batch that iteration yielded.

        After the last batch of an epoch it is the beginning of the next one, so that ``range(reader.position.epoch,
        10)`` are the epochs that are left of 10, whenever the state was saved.
        """
        if not self._steps_taken or self._plan_taken is None:
            return self._position
        return self._epochs.planner.after(self._position, self._plan_taken, self._steps_taken)

    def _go_to(self, position: Position) -> None:
        """Set the position, and forget the steps of earlier iterations."""
        self._position, self._plan_taken, self._steps_taken = position, None, 0

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch, which the next iteration yields."""
        self._go_to(Position(epoch=epoch))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rest of the epoch.

        Afterwards the position is the beginning of the next one. The next iteration continues one that was left early;
        one that was left after the epoch's last batch is complete. Do not run two iterations at a time.

        Yields:
            Column name -> tensor or array of shape ``(rows, *column.shape)``.

        Raises:
            DataError: as :meth:`epoch`; or it is a copy in a worker process of a DataLoader.
        """
        worker = get_worker_info()
        if worker is not None:
            raise DataError(
                f"the DataLoader has num_workers={worker.num_workers}: each would read everything, from a copy of the "
                "reader, and begin each epoch where this reader stands: set it to 0, and num_threads of the reader "
                "instead"
            )
        # Not `position`: with "uneven" this rank may have no further step where others have one.
        over = self._plan_taken is not None and self._steps_taken == self._plan_taken.steps
        self._go_to(Position(epoch=self._position.epoch + 1) if over else self.position)
        closed = self._times_closed
        for plan, batch in self._batches(self._position):
            self._plan_taken = plan
            self._steps_taken += 1
            yield batch if self._arrays == "torch" else {name: tensor.numpy() for name, tensor in batch.items()}
        if closed != self._times_closed:
            raise DataError("the reader was closed while it was iterated over: begin a new iteration, which continues")
        self._go_to(Position(epoch=self._position.epoch + 1))

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of any epoch; the position does not change.

        Closing the iterator, or dropping it, ends its threads, unless its last batch was handed out and ``num_epochs``
        says that another epoch follows.

        Args:
            epoch: number of the epoch, any integer.
            start_step: the first step wanted; what only earlier ones need is not read.

        Yields:
            Column name -> tensor of shape ``(rows, *column.shape)`` on the CPU. A tensor may be a view of a larger one
            (see above), where no other batch overlaps it.

        Raises:
            DataError: data cannot be read, or is not what the schema says; file and row group are named.
        """
        begin = start_step * self._batch_size * self._size
        for _, batch in self._batches(Position(epoch=epoch, row=begin)):
            yield batch

    def _batches(self, position: Position) -> Generator[tuple[shards.ShardPlan, Batch], None, None]:
        """The epochs' batches from a position, kept where :meth:`close` finds them."""
        batches = self._epochs.batches(position)
        self._open.add(batches)
        return batches

    def close(self) -> None:
        """End the threads and release what they have read; may be called again.

        An iteration that was left ends too; the next one continues at :attr:`position`.
        """
        for batches in list(self._open):
            if inspect.getgeneratorstate(batches) != inspect.GEN_RUNNING:  # else its own code closes us, and ends it
                batches.close()
        self._epochs.close()
        self._times_closed += 1

    def __enter__(self) -> ParquetReader:
        """The reader; the end of the ``with`` block closes it, also after an error."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def plan(self, epoch: int) -> shards.ShardPlan:
        """What this rank reads in an epoch: its steps, and which rows are padding."""
        return self._epochs.planner.plan(Position(epoch=epoch))

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; the same on all ranks in step."""
        position = self.position
        return {
            "epoch": position.epoch,
            "row": position.row,
            "lanes": position.lanes,
            "window_rows": position.window_rows,
            **self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from the position of the reader that made the state.

        The rest of the epoch keeps the order that it had, so every row that is left comes once, on whatever number of
        ranks; later epochs are those that this reader has by itself.

        Args:
            state: what :meth:`state_dict` returned, on any rank, with any rank, size, batch size and remainder.
            strict: False takes copies of the files for the same data: names, ends and times of files may differ, the
                rows of their row groups may not.

        Raises:
            DataError: it is the state of other data or of another order, or damaged; all differences are named.
        """
        self._go_to(position_of_state(state, self._fingerprint, strict=strict))

    @functools.cached_property
    def _fingerprint(self) -> dict[str, Any]:
        """What must not have changed when a position is taken up again."""
        return fingerprint(self._epochs.planner, self._fragments)

    @functools.cached_property
    def _epochs(self) -> EpochIterator:
        row_bytes = max(self._input.row_bytes, self.schema.row_bytes)
        prefetch = self._prefetch
        budget = Budget.of(
            self._split, row_bytes, self._order.window_bytes, prefetch.num_threads, prefetch.prefetch_bytes
        )
        planner = Planner(
            split=self._split,
            rank=self._rank,
            size=self._size,
            batch_size=self._batch_size,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            remainder=self._remainder,
            window_rows=budget.window_rows,
        )
        return EpochIterator(planner, self._blocks, budget, self._end_epoch, self._mapping)
