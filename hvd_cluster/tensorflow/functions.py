"""Broadcast and allgather of objects, and broadcast of a v1 graph's variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_cluster.engine import objects
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.collectives.broadcast import broadcast_
from hvd_cluster.tensorflow.errors import as_tensorflow_errors


@none_is_default
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcast ``root_rank``'s object to all ranks.

    It runs immediately, also while a v1 graph is built.

    Args:
        obj: any object that cloudpickle supports; other ranks' objects are ignored.
        root_rank: the global rank whose object is broadcast.
        session: accepted and ignored: no graph is needed.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.

    Raises:
        tf.errors.UnknownError: the job has ended.
    """
    del session
    with as_tensorflow_errors():
        return objects.broadcast_object(obj, root_rank, name, process_set)


@none_is_default
def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that calls :func:`broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@none_is_default
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather the objects of all ranks on every rank, in the order of the ranks.

    Args:
        obj: any object that cloudpickle supports.
        session: accepted and ignored: no graph is needed.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.

    Raises:
        tf.errors.UnknownError: the job has ended.
    """
    del session
    with as_tensorflow_errors():
        return objects.allgather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that overwrites a v1 graph's variables with ``root_rank``'s.

    Raises:
        RuntimeError: in eager mode, which has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "hvd.broadcast_variables(<model/optimizer variables>) instead."
        )
    return broadcast_(list(tf.compat.v1.global_variables()), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc,unused-ignore]
    """Broadcasts one rank's variables when a session was created or restored.

    Args:
        root_rank: the global rank whose variables are broadcast.
        device: accepted and ignored.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph before it is finalized."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast the variables, which are initialized now."""
        session.run(self.bcast_op)
