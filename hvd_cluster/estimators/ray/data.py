"""Ray Datasets for fits and models: Ray's tasks write and score them.

Rows never pass through the driver. Rows keep the order of the Dataset's blocks, so an epoch depends only on the seed
and has equal steps on every rank, as with any other data. ``streaming_split`` guarantees neither.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_cluster.data.cancelling import cancel_until
from hvd_cluster.data.writing.assembly import NO_ROWS_TEXT
from hvd_cluster.data.writing.part_writer import OnPart, RemoteParts
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.scoring.shipped_model import ShippedModel, content_key

logger = logging.getLogger(__name__)

#: Blocks per CPU that are written or queued; a queued block stays in the object store.
_TASKS_PER_CPU = 2
#: Seconds without a block after which the log says what Ray's tasks may wait for.
_REPORT_S = 30.0


def parts_of(dataset: Any, columns: Sequence[str]) -> RemoteParts:
    """A Ray Dataset's blocks for :func:`hvd_cluster.data.materializing.materialize`.

    Args:
        dataset: the Ray Dataset.
        columns: the columns to read.

    Raises:
        DataError: it has no rows.
    """
    selected = dataset.select_columns(list(columns))
    return RemoteParts(_arrow_schema(selected), functools.partial(_each_block, selected))


def first_table(dataset: Any, rows: int) -> Any:
    """The first rows of a Ray Dataset as an Arrow table; Ray computes their blocks.

    Raises:
        DataError: it has no rows, or a column of tensors that differ in shape.
    """
    with _Watch():
        for batch in dataset.limit(rows).iter_batches(batch_size=rows, batch_format="pyarrow"):
            _refuse_varying(batch.schema)
            return plain(batch)
    raise DataError(NO_ROWS_TEXT)


def require_shared() -> None:
    """Check that a fit without a store writes to a disk that all Ray nodes see.

    Raises:
        DataError: the cluster has other machines than this one.
    """
    from hvd_cluster.ray import nodes

    others = sorted({node.hostname for node in nodes.living() if node.address != nodes.own_address()})
    if others:
        raise DataError(
            f"store is required with a Ray Dataset on several machines ({', '.join(others)}): give a folder that all "
            'nodes see, for example store="/mnt/work" or store="s3://bucket/work"'
        )


def transform(dataset: Any, scoring: bytes) -> Any:
    """The Dataset with the outputs appended to its columns; lazy like Ray's methods.

    Args:
        dataset: the Ray Dataset.
        scoring: a pickled ``Scoring``, which each of Ray's worker processes loads once.
    """
    import ray

    from hvd_cluster.ray.pickling import MODULE_REMEDY

    shipped = ShippedModel(content_key(scoring), _Stored(ray.put(scoring)), remedy=MODULE_REMEDY)
    append = functools.partial(_score_table, shipped)
    return dataset.map_batches(append, batch_format="pyarrow", batch_size=None, zero_copy_batch=True)


class _Stored:
    """A pickled model in the object store, with the interface of a Spark broadcast."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    @property
    def value(self) -> bytes:
        import ray

        blob: bytes = ray.get(self._ref)
        return blob


def _score_table(shipped: ShippedModel, table: Any) -> Any:
    scoring = shipped.load()
    # Other columns may be of any type.
    features = list(dict.fromkeys(scoring.scorer.inputs.feature_cols))
    taken = table if scoring.predict_fn is not None else table.select(features)
    return scoring.scorer.appended(scoring.score(plain(taken).combine_chunks()), table)


def _each_block(dataset: Any, on_part: OnPart) -> list[dict[str, Any]]:
    """Run ``on_part`` on every block in Ray tasks, and return the results."""
    import ray

    # "SPREAD" leaves the placement group of a Tune trial, whose bundles are for the workers, like Ray Data's own tasks.
    task = ray.remote(_write_block).options(scheduling_strategy="SPREAD")
    shared = ray.put(on_part)
    max_pending = max(2, int(_TASKS_PER_CPU * ray.cluster_resources().get("CPU", 0)))
    pending: list[Any] = []
    results: list[dict[str, Any]] = []
    with _in_order(dataset), _cancelled_on_error(pending), _Watch() as watch:
        part = 0
        for bundle in dataset.iter_internal_ref_bundles():
            watch.advance()
            for block in bundle.block_refs:
                pending.append(task.remote(shared, part, block))
                part += 1
            while len(pending) > max_pending:
                results += _next_results(pending, watch)
        while pending:
            results += _next_results(pending, watch)
    return results


def _next_results(pending: list[Any], watch: _Watch) -> list[dict[str, Any]]:
    """The results of the tasks that are done next, which leave ``pending``."""
    import ray

    done, pending[:] = ray.wait(pending)
    watch.advance()
    results: list[dict[str, Any]] = ray.get(done)
    return results


class _Watch:
    """Context that logs free CPUs while Ray computes or writes no block for a while."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-ray-data-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()  # not joined: it may be asking a cluster that does not answer any more

    def advance(self) -> None:
        """A block is done."""
        self._since_s = time.monotonic()

    def _run(self) -> None:
        from hvd_cluster.ray import nodes

        while not self._ended.wait(max(0.0, self._since_s + _REPORT_S - time.monotonic())):
            if time.monotonic() - self._since_s < _REPORT_S:
                continue
            self.advance()
            living, free = nodes.living(), nodes.free_by_node()
            logger.warning(
                "Ray has computed or written no block of the Dataset for %g s. Its tasks need a CPU each, and %g of "
                "the cluster's %g CPUs are free: actors and placement groups, such as other workers, may hold the rest",
                _REPORT_S,
                sum(free[node.node_id].get("CPU", 0) for node in living),
                sum(node.resources.get("CPU", 0) for node in living),
            )


@contextlib.contextmanager
def _cancelled_on_error(pending: list[Any]) -> Iterator[None]:
    """End all tasks on an exception: they would write into folders being removed.

    Their processes end too (``force``). Ray would run other tasks in a process that was only interrupted, where a
    module whose import was interrupted stays half imported.
    """
    import ray

    def ended(timeout_s: float) -> bool:
        pending[:] = ray.wait(pending, num_returns=len(pending), timeout=timeout_s)[1] if pending else []
        return not pending

    def cancel() -> None:
        for task in pending:
            # Not tasks that are done, such as the failed one: Ray 2.60 kills the driver if a task is cancelled while
            # its result is being received.
            if not ray.wait([task], timeout=0)[0]:
                ray.cancel(task, force=True)

    try:
        yield
    except BaseException:  # raised again; an interrupt must cancel the tasks too
        if not cancel_until(ended, cancel):
            logger.error("%d tasks of the write do not end although they were cancelled repeatedly", len(pending))
        raise


@contextlib.contextmanager
def _in_order(dataset: Any) -> Iterator[None]:
    """Make Ray deliver the blocks in the order of the data, not of their completion."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


def _write_block(on_part: OnPart, part: int, block: Any) -> dict[str, Any]:
    return on_part(part, iter(_table(block).to_batches()))


def _table(block: Any) -> Any:
    """A Dataset's block, perhaps a DataFrame, as an Arrow table of plain types."""
    from ray.data.block import BlockAccessor

    table = plain(BlockAccessor.for_block(block).to_arrow())
    _refuse_varying(table.schema)
    return table


def plain(table: Any) -> Any:
    """``table`` with Ray's tensor columns as fixed-size lists of values in C order.

    Columns whose rows differ in shape are unchanged.
    """
    for index, field in enumerate(table.schema):
        shape = _shape(field.type)
        if shape is not None and None not in shape:
            table = table.set_column(index, field.name, _as_lists(table.column(index), shape))
    return table


def _shape(arrow_type: Any) -> Sequence[int | None] | None:
    """A tensor column's row shape, with None for unequal sizes; None for others."""
    if not hasattr(arrow_type, "storage_type"):
        return None
    shape: Sequence[int | None] | None = getattr(arrow_type, "shape", None)
    # Ray 2.40 has only the number of dimensions if the rows' shapes differ.
    return [None] * arrow_type.ndim if shape is None and hasattr(arrow_type, "ndim") else shape


def _refuse_varying(schema: Any) -> None:
    """Check that the rows of each tensor column have one shape.

    Raises:
        DataError: they do not; the text names the columns.
    """
    varying = [field.name for field in schema if None in (_shape(field.type) or ())]
    if varying:
        raise DataError(
            f"the rows of column {', '.join(map(repr, varying))} differ in shape: a model takes rows of one shape. "
            "Resize or pad them first, for example with dataset.map()"
        )


def _as_lists(column: Any, shape: Sequence[Any]) -> Any:
    import math

    import pyarrow as pa

    size = math.prod(shape)
    chunks = [pa.FixedSizeListArray.from_arrays(chunk.storage.flatten(), size) for chunk in column.chunks]
    return pa.chunked_array(chunks, type=pa.list_(column.type.storage_type.value_type, size))


def _arrow_schema(dataset: Any) -> Any:
    """The Arrow schema of a Dataset's rows; Ray computes the first row if unknown."""
    import pyarrow as pa

    known = dataset.schema()
    schema = getattr(known, "base_schema", None)
    if isinstance(schema, pa.Schema) and not any(isinstance(field.type, pa.BaseExtensionType) for field in schema):
        return schema
    if isinstance(schema, pa.Schema):
        _refuse_varying(schema)
    return first_table(dataset, 1).schema
