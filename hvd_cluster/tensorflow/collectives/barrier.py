"""Join and barrier: the collectives without a tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import Collective, IntegerHandle
from hvd_cluster.tensorflow.interop import call, is_v1_graph
from hvd_cluster.tensorflow.naming import label


def join(name: str | None = None) -> tf.Tensor:
    """Report that this rank has no more data, and block until all ranks have joined.

    Until then, allreduces of the other ranks use zeros for this rank, and an average still divides by all ranks.

    Args:
        name: accepted and ignored: only one join runs at a time.

    Returns:
        The rank that joined last, the same on all ranks: int32 of shape ().
    """
    del name
    (last,) = call(lambda *_: IntegerHandle(running_engine().join()), [], [tf.int32], [tf.TensorShape(())])
    return last


@none_is_default
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Block until every rank has called this.

    It does not wait for operations submitted before.

    Args:
        process_set: the ranks that take part.
        name: matches the call with those of the other ranks.

    Returns:
        None; in a v1 graph, the operation that waits.

    Raises:
        tf.errors.UnknownError: the job has ended.
    """
    collective = Collective(kind=Kind.BARRIER, process_set=process_set, name=label(name, None))
    begin = collective.begin
    passed = call(lambda *arguments: IntegerHandle(begin(*arguments)), [], [tf.int32], [tf.TensorShape(())])
    return tf.group(*passed) if is_v1_graph() else None
