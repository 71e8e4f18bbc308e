"""The rules for arguments that every launcher has, with one text each."""

from __future__ import annotations

import logging
from numbers import Integral

logger = logging.getLogger(__name__)


def wrong_num_proc(num_proc: object) -> list[str]:
    """What is wrong with a number of workers: nothing, or one sentence. None stands for "as many as there is room"."""
    if num_proc is None or (isinstance(num_proc, Integral) and int(num_proc) >= 1):
        return []
    return [f"num_proc={num_proc!r} must be a whole number of at least 1: a job needs a worker"]


def wrong_controllers(use_gloo: bool | None, use_mpi: bool | None) -> list[str]:
    """What is wrong with Horovod's choice of a controller: nothing, or one sentence."""
    if use_gloo and use_mpi:
        return ["use_gloo and use_mpi exclude each other: leave both out"]
    return []


def warn_of_mpi(use_mpi: bool | None) -> None:
    """Say that ``use_mpi=True`` changes nothing."""
    if use_mpi:
        logger.warning("use_mpi=True has no effect: MPI is not used, there is one rendezvous, our own")
