"""The torch.distributed backend "hvd", for DDP, FSDP2, DTensor and their users.

``import hvd_cluster.torch`` registers it; then ``torch.distributed.init_process_group("hvd")`` uses it. See
``docs/torch-backend.md``.

How it works: every call of torch becomes a request of the engine (:mod:`hvd_cluster.engine`), which executes it over
shared memory, Gloo, both, or NCCL, as it does for ``hvd.allreduce``. The alternative, a communicator for each group
that its calls use directly, would save the agreement on what to do next. But a collective in shared memory occupies the
thread that executes it until the other ranks have come. Two groups, or a group and a named operation of another thread,
would deadlock as soon as two ranks execute them in different orders, and they may: torch orders the calls of one group
only. The engine's log is one order for all ranks and groups. The engine also detects dead ranks, reports stalls, and
fuses small calls. All this costs a vote in shared memory per call, or between hosts a message up and down the tree,
because the calls of a training step have the same names in each step (:mod:`~.calls`).

- ``group.py``: torch's collectives, each a :class:`~hvd_cluster.engine.signature.Signature` and what to do at the end.
- ``calls.py``: the names that match calls by their order; ``messages.py``: send and receive.
- ``work.py``: torch's Work, over the engine's handle; ``futures.py``: its future, whose continuations may make calls.
- ``world.py``: which world a group belongs to. A group needs no registration: the engine takes any tuple of ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_cluster.torch.distributed.arguments import c10d
from hvd_cluster.torch.distributed.group import HvdProcessGroup
from hvd_cluster.torch.distributed.updates import count_updates
from hvd_cluster.torch.distributed.world import SCHEME, begin, end, join_world, numbered, rendezvous, set_of

__all__ = ["HvdProcessGroup", "begin", "end", "register"]

BACKEND = "hvd"


def register() -> None:
    """Make ``init_process_group("hvd")`` work; may be called again."""
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        c10d.register_rendezvous_handler(SCHEME, rendezvous)


def _create(options: Any, _: object = None) -> HvdProcessGroup:
    """Called by torch on the ranks of a new group."""
    rank, size = options.group_rank, options.group_size
    ranks = list(options.global_ranks_in_group)
    is_default = not ranks
    if is_default:
        ranks = list(range(size))
        join_world(options.store, rank, size, options.timeout)
    set_id = 0 if is_default else set_of(ranks)
    label = numbered(f"torch group {options.group_id}", set_id)
    if is_default:
        count_updates()
    return HvdProcessGroup(rank, ranks, set_id, label, options.timeout, ends_world=is_default)
