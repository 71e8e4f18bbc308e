"""The tree of reports: a tree of host leaders, with other workers below theirs.

The first rank of each host leads it; rank 0 is the root and writes the log. Between hosts the tree is
``FANOUT``-ary, so a report needs O(log hosts) hops and no rank has more than ``FANOUT`` + local_size - 1 children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Children of a leader among the other leaders. 8 keeps 512 ranks on 64 hosts within three hops of the root.
FANOUT = 8


@dataclass(frozen=True)
class TreePosition:
    """One rank's parent and children in the tree."""

    rank: int
    #: None at the root.
    parent: int | None
    #: For each child, all ranks of its subtree, including itself.
    children: dict[int, frozenset[int]]
    #: All ranks of this rank's host; the first of them leads it, and has the others among its children.
    host_ranks: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """This rank is the first one of its host."""
        return self.rank == self.host_ranks[0]

    @property
    def remote_children(self) -> list[int]:
        """The children on other hosts, which they lead."""
        return [child for child in self.children if child not in self.host_ranks]


def tree_positions(hosts: Sequence[str]) -> list[TreePosition]:
    """The position of every rank.

    Args:
        hosts: for each rank, a string that is equal for ranks of the same host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    order = [ranks[0] for ranks in ranks_of.values()]  # the leaders, by rank, so the root is rank 0
    parents: list[int | None] = [ranks_of[host][0] for host in hosts]
    for index, leader in enumerate(order):
        parents[leader] = None if index == 0 else order[(index - 1) // FANOUT]
    below: list[set[int]] = [{rank} for rank in range(len(hosts))]
    children: list[list[int]] = [[] for _ in hosts]
    # Deepest first: the workers that lead nothing, then the leaders from the last to the first.
    leading = set(order)
    for rank in [r for r in range(len(hosts)) if r not in leading] + order[::-1]:
        parent = parents[rank]
        if parent is not None:
            below[parent] |= below[rank]
            children[parent].append(rank)
    host_ranks = {host: tuple(ranks) for host, ranks in ranks_of.items()}
    return [
        TreePosition(
            rank,
            parents[rank],
            {child: frozenset(below[child]) for child in sorted(children[rank])},
            host_ranks[hosts[rank]],
        )
        for rank in range(len(hosts))
    ]
