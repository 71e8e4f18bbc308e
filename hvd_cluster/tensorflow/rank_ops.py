"""Rank and size as operations, which a graph evaluates when it runs.

So they are correct in a new world too.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
import torch

from hvd_cluster.engine import basics
from hvd_cluster.engine.membership import member_index, num_members, running_engine
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.submission import finished
from hvd_cluster.tensorflow.interop import call


def rank_op(name: str | None = None) -> tf.Tensor:
    """Index of this worker over all workers, int32 of shape ().

    Args:
        name: of the operation.
    """
    return _int_op(basics.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Index of this worker over the workers of its host, int32 of shape ().

    Args:
        name: of the operation.
    """
    return _int_op(basics.local_rank, name)


@none_is_default
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of workers in a process set, int32 of shape ().

    Args:
        process_set_id: of the process set; 0 is the global one.
        name: of the operation.

    Raises:
        tf.errors.InvalidArgumentError: the process set does not exist when the operation runs.
    """
    return _int_op(lambda: len(_ranks(process_set_id)), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Number of workers on this host, int32 of shape ().

    Args:
        name: of the operation.
    """
    return _int_op(basics.local_size, name)


@none_is_default
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this worker is in the process set, else 0; int32 of shape ().

    Args:
        process_set_id: of the process set; 0 is the global one.
        name: of the operation.

    Raises:
        tf.errors.InvalidArgumentError: the process set does not exist when the operation runs.
    """
    return _int_op(lambda: int(basics.rank() in _ranks(process_set_id)), name)


def index_op(process_set: ProcessSet) -> tf.Tensor:
    """This worker's index among the workers of a process set, int32 of shape ()."""
    return _int_op(lambda: member_index(process_set), None)


def num_members_op(process_set: ProcessSet) -> tf.Tensor:
    """Number of workers in a process set, int32 of shape ()."""
    return _int_op(lambda: num_members(process_set), None)


def _ranks(process_set_id: int) -> tuple[int, ...]:
    ranks = running_engine().process_sets.get(process_set_id)
    if ranks is None:
        raise ValueError(f"process set {process_set_id} does not exist or has not been registered")
    return ranks


def _int_op(value: Callable[[], int], name: str | None) -> tf.Tensor:
    (answer,) = call(
        lambda *_: finished([torch.tensor(value(), dtype=torch.int32)]), [], [tf.int32], [tf.TensorShape(())]
    )
    return answer if name is None else tf.identity(answer, name=name)
