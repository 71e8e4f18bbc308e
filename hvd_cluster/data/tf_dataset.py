"""A reader's batches as a ``tf.data.Dataset``.

The only module of ``data`` that uses TensorFlow.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.at_exit import close_at_exit, forget, is_ending
from hvd_cluster.data.optional import load_extra
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    from hvd_cluster.data.reader import ParquetReader

#: Seconds that the end of the interpreter waits for TensorFlow to ask once more, which it does if it has room.
_ASK_AGAIN_S = 0.25
#: Seconds without a call after which there is none to come: one that repeats an iteration follows at once.
_QUIET_S = 0.02
#: Seconds between two looks.
_LOOK_S = 0.001


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
        reader: what to read; each iteration over the data set continues from its position.
        num_epochs: epochs in one iteration over the data set; None for no end.
        map_batch: turns the dictionary of a batch into what the model takes, e.g. ``lambda b: (b["x"], b["y"])``.
        prefetch: batches that TensorFlow takes in advance, in addition to the reader's; -1 lets it choose, and
            turns the pipeline's autotuning off (``tf.data.Options``), whose thread may hold up the end of an iteration.

    Returns:
        A ``tf.data.Dataset`` of dictionaries: column name -> ``tf.Tensor`` of shape (rows, *column.shape). Its
        cardinality is unknown: an iteration that follows one that stopped early has fewer batches.

    Raises:
        MissingExtraError: TensorFlow is not installed.
        DataError: ``num_epochs`` is below 1, or there is no end and no batch.
    """
    if num_epochs is not None and num_epochs < 1:
        raise DataError(f"num_epochs is {num_epochs}: it must be at least 1, or None for no end")
    if num_epochs is None and not reader.steps:
        raise DataError(
            f"the reader makes no batch of its {reader.rows} rows; with num_epochs=None the data set would never "
            "return: pass the reader remainder='pad' or 'partial', or a smaller batch_size"
        )
    tf = _tensorflow()

    def batches() -> Iterator[dict[str, Any]]:
        epoch = 0
        while num_epochs is None or epoch < num_epochs:
            for batch in reader:
                yield {name: values.numpy() if hasattr(values, "numpy") else values for name, values in batch.items()}
            epoch += 1

    signature = {
        column.name: tf.TensorSpec((None, *column.shape), tf.dtypes.as_dtype(column.dtype)) for column in reader.schema
    }
    dataset = _of_generator(batches, signature)
    if map_batch is not None:
        dataset = dataset.map(map_batch)
    return prefetched(dataset, prefetch) if prefetch else dataset


def of_iterator(items: Callable[[], Iterator[Any]], structure: Callable[..., Any], fields: dict[str, Any]) -> Any:
    """A ``tf.data.Dataset`` of what a Python iterator gives.

    Args:
        items: begins an iteration; gives what ``structure`` makes, of NumPy values.
        structure: makes an item, and the description of one, of keyword arguments: ``dict``, or a namedtuple's type.
        fields: name -> (dtype's name, shape with None for lengths that differ).
    """
    tf = _tensorflow()
    signature = structure(
        **{name: tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype)) for name, (dtype, shape) in fields.items()}
    )
    return _of_generator(items, signature)


def of_batches(items: Callable[[], Iterator[Any]], example: Any, prefetch: int = 0) -> Any:
    """A ``tf.data.Dataset`` of batches of arrays, in any nest of tuples and dicts.

    Args:
        items: begins an iteration.
        example: one of its items; the others have the same nest, dtypes and shapes; only the number of rows differs.
        prefetch: batches that TensorFlow takes in advance; 0 lets it choose.
    """
    tf = _tensorflow()
    signature = tf.nest.map_structure(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), example)
    return prefetched(_of_generator(items, signature), prefetch or tf.data.AUTOTUNE)


def _tensorflow() -> Any:
    return load_extra("tensorflow", "tensorflow", "to make a tf.data.Dataset of a reader")


def _of_generator(items: Callable[[], Iterator[Any]], signature: Any) -> Any:
    tf = _tensorflow()
    return tf.data.Dataset.from_generator(lambda: _ServedItems(items()), output_signature=signature)


def prefetched(dataset: Any, num_batches: int) -> Any:
    """Batches taken in advance; -1 lets this step choose how many.

    It chooses by how often it had none. TensorFlow's autotuning of whole pipelines is off for that. It has a thread
    that may not hear of the end, and sleeps on until its next turn, for up to a minute; who deletes the iterator waits
    for it. (A cancellation wakes the thread before it sets the flag that the thread looks at:
    ``CancellationManager::StartCancel`` and ``Model::OptimizeLoop``. With TensorFlow 2.21, of 20 deletions 2 took as
    long as the iterator had lived, and more.)
    """
    tf = _tensorflow()
    prefetched = dataset.prefetch(num_batches)
    if num_batches != tf.data.AUTOTUNE:
        return prefetched
    options = tf.data.Options()
    options.autotune.enabled = False
    return prefetched.with_options(options)


class _ServedItems(Iterator[Any]):
    """Items that threads of TensorFlow ask for.

    TensorFlow releases this object after the last one.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._calls = _Calls()

    def __next__(self) -> Any:
        return self._calls.answer(self._items)

    def __del__(self) -> None:
        self._calls.let_go_by = threading.get_ident()
        del self._items  # here, and not behind this method: it may wait for threads that read


class _Calls:
    """The calls for one iteration's items; the end of the interpreter waits for them.

    TensorFlow refuses to call Python after that. But a call under way would never return, and an iterator that is
    still there waits for it when it is deleted.
    """

    def __init__(self) -> None:
        #: The threads that asked last, and that deleted the items.
        self.let_go_by: int | None = None
        self._asked_by: int | None = None
        self._told_at_s: float | None = None
        close_at_exit(self)

    def answer(self, items: Iterator[Any]) -> Any:
        """The next item; none when the interpreter ends."""
        self._asked_by = threading.get_ident()
        try:
            if not is_ending():
                return next(items)
        except Exception:  # the reader's or the user's own code, which may raise anything
            if not is_ending():  # otherwise it is not seen, and may only say that the reader was closed
                raise
        raise StopIteration

    def close(self, timeout_s: float | None = None) -> None:
        """Wait at most ``timeout_s`` until no thread is in a call.

        TensorFlow then knows that it was the last.
        """
        now = time.monotonic()
        deadline = math.inf if timeout_s is None else now + timeout_s
        self._told_at_s = told_at_s = now if self._told_at_s is None else self._told_at_s
        busy_at_s = now
        while now < deadline:
            if self._is_in_python():
                busy_at_s = now
            elif (self.let_go_by is not None or now > told_at_s + _ASK_AGAIN_S) and now > busy_at_s + _QUIET_S:
                forget(self)
                return
            time.sleep(_LOOK_S)
            now = time.monotonic()

    def _is_in_python(self) -> bool:
        threads = {self._asked_by, self.let_go_by} - {None, threading.get_ident()}
        return not threads.isdisjoint(sys._current_frames())
