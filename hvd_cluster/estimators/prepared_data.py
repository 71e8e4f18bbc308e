"""Prepare data once for several fits, with ``horovod.spark.common.util``'s names.

>>> with prepare_data(2, store, df, label_columns=["y"], feature_columns=["x"], validation=0.1) as index:
...     model = estimator.fit_on_parquet(dataset_idx=index)
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing import validation as validation_rule
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.fit_data import StoredParquet
from hvd_cluster.estimators.frames import column_names
from hvd_cluster.estimators.run_lease import RunLease
from hvd_cluster.estimators.spec import as_warnings

#: Indices are random, because other processes use the same store.
_NUM_INDICES = 2**31
_prepared: dict[int, Dataset] = {}


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Store | str,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None = None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,  # noqa: ARG001 - Horovod's signature
    partitions_per_process: int = 10,
    verbose: int = 0,  # noqa: ARG001 - likewise
    *,
    allow_ragged: bool = False,
) -> Iterator[int]:
    """Write a DataFrame as training and validation data until the context ends.

    Args:
        num_processes: workers that will read it.
        store: where to write, a Store or its prefix.
        df: a Spark or pandas DataFrame, an Arrow table, or a Parquet path.
        label_columns, feature_columns: what to write; None for all other columns as features.
        validation: share of the rows, or the column that marks them.
        sample_weight_col: the column with the weights of rows.
        compress_sparse: no effect: columns of sparse vectors are always stored compactly.
        partitions_per_process: Parquet files for each worker.
        verbose: no effect.
        allow_ragged: lists in a column may differ in length, for an estimator with a ``transformation_fn``.

    Yields:
        The index of the data set, for ``fit_on_parquet`` and :func:`get_dataset_properties`. It is unique over all
        processes, so that the data of other fits is never overwritten.

    Raises:
        DataError: columns are missing or cannot be trained on, or a part has no rows.
    """
    opened = Store.create(store)
    given = {validation} if isinstance(validation, str) else set()
    if feature_columns is None:
        others = {*label_columns, sample_weight_col, *given}
        feature_columns = [name for name in column_names(df) if name not in others]
    columns = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    index = secrets.randbelow(_NUM_INDICES)
    opened.check_writable()
    with RunLease(opened, f"prepare_data {index}", exclusive=False, token=str(index)):
        dataset = materialize(
            df,
            opened,
            columns=columns,
            validation=validation,
            num_proc=num_processes,
            partitions_per_process=partitions_per_process,
            dataset_id=str(index),
            allow_ragged=allow_ragged,
            in_place=False,  # the index names a place in the store
        )
        _prepared[index] = dataset
        try:
            yield index
        finally:
            _prepared.pop(index, None)
            with as_warnings(f"the rows were not removed; delete {', '.join(dataset.folders)}"):
                dataset.remove()


def get_dataset_properties(dataset_idx: int) -> tuple[int, int, dict[str, Any], float]:
    """``(train_rows, val_rows, metadata, avg_row_size)`` of an open ``dataset_idx``.

    ``metadata`` has a dict ``{"shape", "dtype", "intermediate_format"}`` for each column; the average is in bytes.

    Raises:
        KeyError: no context with this index is open.
    """
    return _properties(_prepared[dataset_idx])


def get_simple_meta_from_parquet(
    store: Store | str,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | str | None = None,
) -> tuple[int, int, dict[str, Any], float]:
    """The same for Parquet that is already at the store's paths.

    Raises:
        DataError: no Parquet can be read there, or columns are missing.
    """
    columns = [*label_columns, *feature_columns, *([sample_weight_col] if sample_weight_col else [])]
    return _properties(StoredParquet(Store.create(store), dataset_idx).dataset(columns, 1))


def _properties(dataset: Dataset) -> tuple[int, int, dict[str, Any], float]:
    groups = dataset.train.row_groups
    held_out = 0 if dataset.validation is None else dataset.validation.rows
    metadata = {
        column.name: {
            "shape": math.prod(column.shape) if column.shape else 1,
            "dtype": column.dtype,
            "intermediate_format": column.kind.value,
        }
        for column in dataset.schema
    }
    return dataset.train.rows, held_out, metadata, sum(group.size_bytes for group in groups) / dataset.train.rows


def clear_training_cache() -> None:
    """Remove the data of all open contexts."""
    while _prepared:
        _prepared.popitem()[1].remove()


def check_validation(validation: Any, df: Any = None) -> None:
    """Check that a value can select the validation rows.

    Raises:
        DataError: it has another type or is out of range, or ``df`` has no such column.
    """
    checked = validation_rule.check(validation)
    if isinstance(checked, str) and df is not None and checked not in column_names(df):
        raise DataError(f"validation column {checked!r} does not exist in the DataFrame")


def check_shape_compatibility(
    metadata: Mapping[str, Mapping[str, Any]],
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Sequence[int]] | None = None,
    output_shapes: Sequence[Sequence[int]] | None = None,
    label_shapes: Sequence[Sequence[int]] | None = None,
) -> None:
    """Check that each column has as many numbers per row as its shape.

    A -1 in a shape stands for the rows.

    Raises:
        ValueError: lists have unequal lengths, or sizes differ; all at once.
    """
    wrong: list[str] = []
    for columns, shapes, what in (
        (feature_columns, input_shapes, "input_shapes"),
        (label_columns, label_shapes or output_shapes, "label_shapes" if label_shapes else "output_shapes"),
    ):
        if shapes is None:
            continue
        if len(shapes) != len(columns):
            wrong.append(f"{what} has {len(shapes)} entries for {len(columns)} columns: give one for each")
            continue
        wrong += [
            f"column {name!r} has {metadata[name]['shape']} numbers per row, but {what} says {list(shape)}"
            for name, shape in zip(columns, shapes, strict=True)
            if metadata[name]["shape"] != math.prod(size for size in shape if size != -1)
        ]
    if wrong:
        raise ValueError("\n".join(wrong))


def to_list(var: Any, length: int) -> list[Any] | None:
    """``var`` as a list of ``length`` entries, or None; a single value is repeated.

    Raises:
        ValueError: it is a list of another length.
    """
    if var is None:
        return None
    listed = list(var) if isinstance(var, (list, tuple)) else [var] * length
    if len(listed) == 1:
        listed *= length
    if len(listed) != length:
        raise ValueError(f"a list of {len(listed)} entries was given where {length} are needed")
    return listed


def get_spark_df_output_schema(
    df_schema: Any,
    label_columns: Sequence[str],
    output_columns: Sequence[str],
    metadata: Any = None,  # noqa: ARG001 - Horovod's signature
) -> Any:
    """The Spark schema of a transformed DataFrame; outputs have their labels' types.

    Args:
        df_schema: schema of the DataFrame.
        label_columns, output_columns: one output for each label.
        metadata: no effect; the types come from the schema.
    """
    from pyspark.sql.types import StructField, StructType

    added = [
        StructField(output, df_schema[label].dataType, nullable=True)
        for label, output in zip(label_columns, output_columns, strict=True)
    ]
    return StructType([*df_schema.fields, *added])
