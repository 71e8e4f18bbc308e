"""The reporting tree: one leader for each host, every rank below the root, no rank with too many children."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.engine.tree import FANOUT, tree_positions


@pytest.mark.long
@given(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1, max_size=60))
def test_every_rank_hangs_below_the_root_exactly_once(hosts: list[str]) -> None:
    positions = tree_positions(hosts)
    assert positions[0].parent is None
    assert set().union(*positions[0].children.values(), {0}) == set(range(len(hosts)))
    for position in positions:
        for child, below in position.children.items():
            assert positions[child].parent == position.rank
            assert below == {child}.union(*positions[child].children.values())
        parts = list(position.children.values())
        assert sum(map(len, parts)) == len(set().union(*parts)) if parts else True


@pytest.mark.long
@given(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=2, max_size=60))
def test_only_leaders_talk_between_hosts(hosts: list[str]) -> None:
    leaders = {host: hosts.index(host) for host in hosts}
    for position in tree_positions(hosts):
        if position.rank != leaders[hosts[position.rank]]:
            assert position.parent == leaders[hosts[position.rank]]
            assert not position.children
        remote = [child for child in position.children if hosts[child] != hosts[position.rank]]
        assert len(remote) <= FANOUT


def test_512_ranks_on_64_hosts_are_three_hops_deep() -> None:
    positions = tree_positions([f"host{rank // 8}" for rank in range(512)])

    def depth(rank: int) -> int:
        parent = positions[rank].parent
        return 0 if parent is None else 1 + depth(parent)

    # Two hops between leaders reach 1 + 8 + 64 hosts, and one more the workers of a host.
    assert max(depth(rank) for rank in range(512)) == 3
