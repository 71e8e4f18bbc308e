"""What this rank knows of ranks that do not answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from hvd_cluster.engine.messages import StallReply
from hvd_cluster.engine.signature import ranks_of
from hvd_cluster.engine.stall_report import silent_leader
from hvd_cluster.engine.submission_queue import SubmissionQueue
from hvd_cluster.engine.tree import tree_positions
from hvd_cluster.engine.world import World
from hvd_cluster.monitor.stacks import process_state


class PeerState:
    """The other ranks as one rank sees them.

    Args:
        world: its hosts and processes are read.
        process_sets: the ranks of each process set.
        submissions: the requests of this rank.
    """

    def __init__(self, world: World, process_sets: Mapping[int, tuple[int, ...]], submissions: SubmissionQueue) -> None:
        self._world = world
        self._process_sets = process_sets
        self._submissions = submissions

    def process(self, rank: int) -> str:
        """What keeps the process of a rank on this host from running; "" if nothing does."""
        pid = self._world.pids[rank]
        return process_state(pid) if pid else ""

    def named(self, ranks: Iterable[int], mark: str = "") -> str:
        """The ranks, hosts, and what stops them, e.g. "rank 3 on a (it has ended)"."""
        states = {rank: self.process(rank) for rank in ranks}
        return ", ".join(
            f"rank {rank}{mark} on {self._world.hosts[rank]}" + (f" ({state})" if state else "")
            for rank, state in states.items()
        )

    def needed_to_leave(self) -> str:
        """The ranks by which this one leaves: those above it, at the root its children.

        If the processes of some are known not to run, only these.
        """
        positions = tree_positions(self._world.host_keys)
        above, position = [], positions[self._world.topology.rank]
        while position.parent is not None:
            above.append(position.parent)
            position = positions[position.parent]
        ranks = above or list(position.children)
        return self.named([rank for rank in ranks if self.process(rank)] or ranks)

    def last_operation(self, rank: int) -> str:
        """The last operation finished together with ``rank``, as the end of a sentence."""
        last = self._submissions.last_finished.items()
        finished = [(at_s, name) for set_id, (name, at_s) in last if rank in ranks_of(self._process_sets, set_id)]
        if not finished:
            return ""
        at_s, name = max(finished)
        return f"; it last took part in {name}, {time.monotonic() - at_s:.1f} s ago"

    def silence(self, rank: int, replies: Mapping[int, StallReply]) -> str:
        """Why nothing is known of a rank on another host, as far as this rank knows."""
        silent = silent_leader(rank, replies, tree_positions(self._world.host_keys))
        if silent is not None:
            return f"its messages pass through rank {silent}, which does not answer either"
        return f"it is stopped or inside a C call{self.last_operation(rank)}"
