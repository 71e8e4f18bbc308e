"""Elastic training with torch: ``@hvd.elastic.run``, :class:`TorchState`, :class:`ElasticSampler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvd_cluster.elastic.loop import rejoin, run_fn
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.torch.elastic.sampler import ElasticSampler
from hvd_cluster.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Make a training function survive the loss and the arrival of workers.

    Args:
        func: its first argument is a :class:`State`; its result is returned. It is called again, with the
            state as of its last commit, when a worker was lost, and with the state as it is when workers came or left.
    """
    return run_fn(func, rejoin)
