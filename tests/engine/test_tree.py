"""The reporting tree: one leader for each host, every rank below the root, no rank with too many children."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.engine.tree import FANOUT, plan


@pytest.mark.long
@given(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1, max_size=60))
def test_every_rank_hangs_below_the_root_exactly_once(hosts: list[str]) -> None:
    places = plan(hosts)
    assert places[0].parent is None
    assert set().union(*places[0].children.values(), {0}) == set(range(len(hosts)))
    for place in places:
        for child, below in place.children.items():
            assert places[child].parent == place.rank
            assert below == {child}.union(*places[child].children.values())
        parts = list(place.children.values())
        assert sum(map(len, parts)) == len(set().union(*parts)) if parts else True


@pytest.mark.long
@given(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=2, max_size=60))
def test_only_leaders_talk_between_hosts(hosts: list[str]) -> None:
    leaders = {host: hosts.index(host) for host in hosts}
    for place in plan(hosts):
        if place.rank != leaders[hosts[place.rank]]:
            assert place.parent == leaders[hosts[place.rank]]
            assert not place.children
        remote = [child for child in place.children if hosts[child] != hosts[place.rank]]
        assert len(remote) <= FANOUT


def test_512_ranks_on_64_hosts_are_three_hops_deep() -> None:
    places = plan([f"host{rank // 8}" for rank in range(512)])

    def depth(rank: int) -> int:
        parent = places[rank].parent
        return 0 if parent is None else 1 + depth(parent)

    # Two hops between leaders reach 1 + 8 + 64 hosts, and one more the workers of a host.
    assert max(depth(rank) for rank in range(512)) == 3
