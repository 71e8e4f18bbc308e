"""The ranks of a process set, as the running engine knows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.engine import current
from hvd_cluster.engine.compiled_steps import keep_untraced
from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.submission_queue import SerialNumber
from hvd_cluster.errors import HorovodInternalError, NotInitializedError


def running_engine() -> Engine:
    """The running engine.

    Collectives report its absence as :class:`HorovodInternalError`, unlike ``rank()`` and its family.
    """
    keep_untraced()
    try:
        return current.engine()
    except NotInitializedError as error:
        raise HorovodInternalError(str(error)) from None


def require_process_set(process_set: object) -> None:
    """Raise ``ValueError`` if ``process_set`` is not one."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            f"process_set={process_set!r} is not an hvd.ProcessSet: pass one to hvd.init(process_sets=[...])"
        )


def takes_part(process_set: ProcessSet) -> bool:
    """Whether this rank is in a process set.

    If it is not, optimizers and tapes do not change its gradients.
    """
    require_process_set(process_set)
    return process_set.included()


def process_set_id(process_set: ProcessSet) -> int:
    """The id of a registered process set."""
    require_process_set(process_set)
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} does not exist or has not been registered")
    return process_set.process_set_id


def members(process_set: ProcessSet) -> tuple[int, ...]:
    """The global ranks that take part."""
    return running_engine().process_sets[process_set_id(process_set)]


def num_members(process_set: ProcessSet) -> int:
    """How many ranks take part."""
    return len(members(process_set))


def member_index(process_set: ProcessSet) -> int:
    """This rank's index among those that take part."""
    return members(process_set).index(running_engine().world.topology.rank)


def next_number(process_set: ProcessSet, family: str) -> SerialNumber:
    """The next number of unnamed operations in a family, by which ranks match them."""
    return running_engine().next_number(process_set_id(process_set), family)


def rows_by_rank(tensor: torch.Tensor, given: Sequence[torch.Tensor], process_set: ProcessSet) -> tuple[int, ...]:
    """How many rows of ``tensor`` an alltoall sends to each rank.

    Args:
        tensor: shape (rows, ...).
        given: the user's splits, int32 of shape (ranks,), or empty for equal splits.
        process_set: whose ranks take part.

    Raises:
        ValueError: the splits do not describe the tensor.
        HorovodInternalError: the tensor has no dimension.
    """
    num_ranks = num_members(process_set)
    if tensor.dim() == 0:
        raise HorovodInternalError(f"Rank {current.rank()} tried to ALLTOALL a rank-zero tensor.")
    rows = tensor.shape[0]
    if not given:
        if rows % num_ranks:
            raise ValueError(
                f"the first dimension of the tensor, {rows}, cannot be split equally over {num_ranks} ranks"
            )
        return (rows // num_ranks,) * num_ranks
    (splits,) = given
    if splits.dim() != 1 or splits.dtype != torch.int32:
        got = f"{str(splits.dtype).removeprefix('torch.')} of shape {tuple(splits.shape)}"
        raise ValueError(f"splits must be a 1-D int32 tensor, not {got}: pass a list, or convert it to int32")
    counts = tuple(int(count) for count in splits.tolist())
    if len(counts) != num_ranks or min(counts) < 0:
        raise ValueError(f"splits must hold the rows for each of the {num_ranks} ranks, and holds {counts}")
    if sum(counts) > rows:
        raise ValueError(f"splits send {sum(counts)} rows, but the tensor has {rows}")
    return counts
