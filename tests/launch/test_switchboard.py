"""Agents that are started through an ssh that leads back to this host."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.reach import Beacon, Claim
from hvd_cluster.launch.ssh import Ssh
from hvd_cluster.launch.switchboard import Switchboard
from hvd_cluster.rendezvous.secret import new_secret

SECRET = new_secret()


def test_a_host_that_is_closed_twice_closes_nothing_of_others(loopback_ssh: Path) -> None:
    board = Switchboard(SECRET, Ssh(), (), lambda: None)
    try:
        board.connect([Host("elsewhere", 1)], patient=False)
        remote = board.remotes["elsewhere"]
        remote.let_end()
        remote.close(time.monotonic() + 10)
        # The lowest free numbers: that of the closed pipe is among them.
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    finally:
        board.close()
    for other in others:
        os.close(other)  # an error where somebody has closed it


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(loopback_ssh: Path) -> None:
    board = Switchboard(SECRET, Ssh(), (), lambda: None)
    beacon = Beacon(SECRET, "here")
    try:
        board.connect([Host("elsewhere", 1)], patient=False)
        remote = board.remotes["elsewhere"]
        claim = Claim("here", ("127.0.0.1",), beacon.port)
        assert remote.call((claim,), 0.0) == {}  # nobody answers in no time
        nobody = Claim("nobody", ("127.0.0.1",), 9)
        assert remote.call((nobody,), 30) == {"nobody": ()}
        answers: dict[int, object] = {}

        def ask(number: int) -> None:
            answers[number] = remote.call((claim if number % 2 else nobody,), 30)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {n: {"here": ("127.0.0.1",)} if n % 2 else {"nobody": ()} for n in range(8)}
    finally:
        beacon.close()
        board.close()
