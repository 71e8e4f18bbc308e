"""Send a Spark DataFrame to the workers without a store; needs pyspark."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel

from hvd_cluster.data import schema_spark, spark_jobs
from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.local_arrow import write_arrow
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.spark_jobs import map_batches, quoted
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing import part_transfer
from hvd_cluster.data.writing import validation as validation_rule
from hvd_cluster.data.writing.part_file import PartPlan
from hvd_cluster.estimators.run.direct_rows import DirectRows
from hvd_cluster.spark.task_function import Rows

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that the driver collects to try the model on.
_SAMPLE_ROWS = 32


def direct_rows(
    frame: Any,
    store: Store,
    *,
    columns: Sequence[str],
    validation: float | str | None,
    num_proc: int,
    partitions_per_process: int,
    seed: int,
    allow_ragged: bool,
    tensors_only: bool,
    raw: Sequence[str],
) -> tuple[Dataset, DirectRows]:
    """A few rows of ``frame`` as a data set in ``store``, and all rows for workers.

    Partitions, split and files are those of ``materialize`` with the same arguments.

    Raises:
        DataError: columns are missing or of an unsupported type, the validation column cannot mark rows, or there are
            no rows.
    """
    columns, validation = list(dict.fromkeys(columns)), validation_rule.check(validation, columns)
    schema = schema_spark.infer_split(frame.schema, columns, validation, raw=raw)
    selected = frame.select(*map(quoted, [*columns, *([validation] if isinstance(validation, str) else [])]))
    sample = write_arrow(
        first_batches(selected),
        f"{store.prefix}/sample",
        columns=columns,
        allow_ragged=allow_ragged,
        tensors_only=tensors_only,
        raw=raw,
        first_rows=_SAMPLE_ROWS,
    )
    plan = PartPlan(
        store=store,
        schema=schema,
        train_folder="",
        validation_folder="",
        validation=validation,
        seed=seed,
        allow_ragged=allow_ragged,
    )
    parts = selected.coalesce(num_proc * partitions_per_process)
    # Persisted, so that restarted workers get the same bytes.
    rows = map_batches(parts, _Packed(plan), part_transfer.SCHEMA).persist(StorageLevel.DISK_ONLY)
    receiver = f"{part_transfer.__name__}:{part_transfer.received.__name__}"
    return sample, DirectRows(plan, num_proc, Rows(rows, "part", receiver))


@dataclass(frozen=True)
class _Packed:
    """The function of a task, over its partition."""

    plan: PartPlan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        return part_transfer.pack_part(self.plan, context.partitionId() if context is not None else 0, batches)


def first_batches(frame: Any) -> Iterator[pa.RecordBatch]:
    """First rows as tasks read them, with vectors as structs.

    ``toArrow`` of older Spark does not return these.

    Raises:
        DataError: Python cannot read a column.
    """
    schema_spark.infer(frame.schema, wrong=[])
    streams = map_batches(frame.limit(_SAMPLE_ROWS), _as_streams, "data binary")
    found = spark_jobs.run(frame.sparkSession, streams.collect, "a few rows to try the model on")
    ipc = load_pyarrow("pyarrow.ipc")
    return itertools.chain.from_iterable(iter(ipc.open_stream(bytes(row["data"]))) for row in found)


def _as_streams(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
    for batch in batches:
        sink = io.BytesIO()
        with ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pyarrow.RecordBatch.from_pydict({"data": [sink.getvalue()]})
