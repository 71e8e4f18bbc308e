"""Making all ranks equal: any Python object, and the variables of a v1 graph, sent from one rank to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_cluster.engine import objects
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.collectives.broadcast import broadcast_
from hvd_cluster.tensorflow.errors import as_tensorflow_errors


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank ``root_rank``'s object, now; also while a v1 graph is built.

    Args:
        obj: anything that cloudpickle takes; what the other ranks pass is ignored.
        root_rank: the global rank whose object all get.
        session: accepted, and without effect: no graph is needed.
        name: matches the call with those of the other ranks.
        process_set: whose ranks take part.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.

    Raises:
        tf.errors.UnknownError: the job has ended.
    """
    del session
    with as_tensorflow_errors():
        return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function of one object that is :func:`broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Give every rank the objects of all ranks, in the order of the ranks.

    Args:
        obj: anything that cloudpickle takes.
        session: accepted, and without effect: no graph is needed.
        name: matches the call with those of the other ranks.
        process_set: whose ranks take part.

    Raises:
        tf.errors.UnknownError: the job has ended.
    """
    del session
    with as_tensorflow_errors():
        return objects.allgather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that overwrites all variables of the present v1 graph with those of ``root_rank``.

    Raises:
        RuntimeError: eagerly, where there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "hvd.broadcast_variables(<model/optimizer variables>) instead."
        )
    return broadcast_(list(tf.compat.v1.global_variables()), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc,unused-ignore]
    """Overwrites all variables with those of one rank when a session has been made, restored or not.

    Args:
        root_rank: the global rank whose variables all get.
        device: accepted, and without effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """The graph is about to be finalized: add the broadcast to it."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """All variables have values: broadcast them."""
        session.run(self.bcast_op)
