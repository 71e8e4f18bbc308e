"""Join and barrier: the collectives without tensors."""

from __future__ import annotations

import torch

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import submit


@none_is_default
def join(device: int = -1) -> int:
    """Report that this rank has no more data, and block until all ranks have joined.

    Until then, this rank does not change a sum, minimum, maximum or product of the others' allreduces; an average still
    divides by all ranks. Unnamed operations are numbered from 0 again afterwards.

    Args:
        device: the GPU for the zeros that stand in for GPU tensors; -1 for the current one.

    Returns:
        The rank that joined last, the same number on all ranks.
    """
    if device < 0 and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    result: int = running_engine().join(device).wait()
    return result


@none_is_default
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank has called this.

    Does not wait for operations submitted before.

    Args:
        process_set: the ranks that take part.
    """
    submit(Kind.BARRIER, [], process_set=process_set, is_waited_for=True).wait()
