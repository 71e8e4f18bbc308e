"""A reader's batches as a ``tf.data.Dataset``; the one place in ``data`` that knows TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvd_cluster.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from hvd_cluster.data.reader import ParquetReader


def to_tf_dataset(
    reader: ParquetReader,
    num_epochs: int | None = 1,
    *,
    map_batch: Callable[[dict[str, Any]], Any] | None = None,
    prefetch: int = 0,
) -> Any:
    """The batches of a reader for ``model.fit`` and other loops of TensorFlow.

    The reader's position moves as batches are taken into the pipeline, so with ``prefetch`` it is ahead of the model.

    Args:
        reader: what to read; each iteration over the data set goes on from its position.
        num_epochs: epochs in one iteration over the data set; None for no end.
        map_batch: turns the dictionary of a batch into what the model takes, e.g. ``lambda b: (b["x"], b["y"])``.
        prefetch: batches that TensorFlow takes in advance, besides those that the reader does; -1 lets it choose.

    Returns:
        A ``tf.data.Dataset`` of dictionaries: column name -> ``tf.Tensor`` of shape (rows, *column.shape). Its
        cardinality is unknown: an iteration that follows one that stopped early has fewer batches.

    Raises:
        MissingExtraError: TensorFlow is not installed.
        DataError: ``num_epochs`` is below 1.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingExtraError("tensorflow", "tensorflow", "to make a tf.data.Dataset of a reader") from error
    if num_epochs is not None and num_epochs < 1:
        raise DataError(f"num_epochs is {num_epochs}: it must be at least 1, or None for no end")

    def batches() -> Iterator[dict[str, Any]]:
        epoch = 0
        while num_epochs is None or epoch < num_epochs:
            for batch in reader:
                yield {name: values.numpy() if hasattr(values, "numpy") else values for name, values in batch.items()}
            epoch += 1

    signature = {
        column.name: tf.TensorSpec((None, *column.shape), tf.dtypes.as_dtype(column.dtype)) for column in reader.schema
    }
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    if map_batch is not None:
        dataset = dataset.map(map_batch)
    return dataset.prefetch(prefetch) if prefetch else dataset


def of_iterator(items: Callable[[], Iterator[Any]], structure: Callable[..., Any], fields: dict[str, Any]) -> Any:
    """A ``tf.data.Dataset`` of what a Python iterator gives.

    Args:
        items: begins an iteration; gives what ``structure`` makes, of NumPy values.
        structure: makes an item, and the description of one, of keyword arguments: ``dict``, or a namedtuple's type.
        fields: name -> (dtype's name, shape with None for lengths that differ).

    Raises:
        MissingExtraError: TensorFlow is not installed.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingExtraError("tensorflow", "tensorflow", "to make a tf.data.Dataset of a reader") from error
    signature = structure(
        **{name: tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype)) for name, (dtype, shape) in fields.items()}
    )
    return tf.data.Dataset.from_generator(items, output_signature=signature)


def of_batches(items: Callable[[], Iterator[Any]], example: Any, prefetch: int = 0) -> Any:
    """A ``tf.data.Dataset`` of batches of arrays, in any nest of tuples and dicts.

    Args:
        items: begins an iteration.
        example: one of its items; others have the same nest, dtypes and shapes, but for the number of rows.
        prefetch: batches that TensorFlow takes in advance; 0 lets it choose.

    Raises:
        MissingExtraError: TensorFlow is not installed.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingExtraError("tensorflow", "tensorflow", "to make a tf.data.Dataset of a reader") from error
    signature = tf.nest.map_structure(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), example)
    dataset = tf.data.Dataset.from_generator(items, output_signature=signature)
    return dataset.prefetch(prefetch or tf.data.AUTOTUNE)
