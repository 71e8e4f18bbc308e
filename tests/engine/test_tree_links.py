"""What a rank learns from its connections while it waits for other ranks."""

from __future__ import annotations

import pickle
import select
import socket
from collections.abc import Iterator

import pytest

from hvd_cluster.engine.messages import Abort, Goodbye, LogMessage, Message
from hvd_cluster.engine.tree import tree_positions
from hvd_cluster.engine.tree_links import PeerLost, TreeLinks
from hvd_cluster.engine.world import World
from hvd_cluster.rendezvous.link import Link
from hvd_cluster.topology import Topology

SECRET = b"s" * 32


class Pair:
    """Rank 1, and its connection to rank 0 seen from the other end."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.far = Link(far, SECRET, accepts=True)
        link = Link(near, SECRET, accepts=False)
        while not (link.established and self.far.established):
            for end in (link, self.far):
                end.flush()
                end.receive()
        world = World(
            topology=Topology(rank=1, size=2, secret=SECRET),
            tree_position=tree_positions(["a", "b"])[1],
            links={0: link},
            hosts=["a", "b"],
            host_keys=["a", "b"],
            pids=[0, 0],
            local_indices=[(0, 1), (0, 1)],
            address="127.0.0.1",
            client=None,
            prefix="",
        )
        self.poll = select.epoll()
        self.near = TreeLinks(world, self.poll)
        self._link = link

    def say(self, message: Message) -> None:
        self.far.send(pickle.dumps(message))

    def close(self) -> None:
        for link in (self._link, self.far):
            link.close()
        self.poll.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_rank_whose_end_was_heard_is_gone_at_every_later_look_too(pair: Pair) -> None:
    pair.far.close()
    with pytest.raises(PeerLost, match="rank 0 on a is gone"):
        pair.near.receive(0)
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 0 on a is gone"):
            pair.near.check()


def test_an_abort_that_waits_behind_other_messages_is_the_reason(pair: Pair) -> None:
    pair.say(LogMessage(()))
    pair.say(Abort("rank 3 on b is gone"))
    pair.near.receive(0)
    pair.far.close()
    assert next(pair.near.take()) == (0, LogMessage(()))
    with pytest.raises(PeerLost, match="rank 3 on b"):
        pair.near.check()


def test_the_end_after_a_farewell_is_none_to_report(pair: Pair) -> None:
    pair.say(Goodbye())
    pair.near.receive(0)
    pair.far.close()
    pair.near.check()
    with pytest.raises(PeerLost):
        pair.near.receive(0)
    pair.near.check()
