"""Join and barrier: the collectives that move no tensor of the caller's."""

from __future__ import annotations

from hvd_cluster.engine import basics
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Kind
from hvd_cluster.errors import HorovodInternalError, NotInitializedError
from hvd_cluster.torch.submission import submit, synchronize


def join(device: int = -1) -> int:
    """Say that this rank has run out of data; blocks until all ranks have.

    Until then the others' allreduces take zeros from this rank, and an average still divides by all ranks.

    Args:
        device: the GPU for the zeros, or -1 for the CPU; they follow the others' tensors here.

    Returns:
        The rank that joined last, the same number on all ranks.
    """
    del device
    try:
        handle = basics.engine().join()
    except NotInitializedError as error:
        raise HorovodInternalError(str(error)) from None
    result: int = handle.wait()
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank has come here. Operations submitted before are not waited for."""
    synchronize(submit(Kind.BARRIER, [], process_set=process_set, name=None, finish=lambda _: None))
