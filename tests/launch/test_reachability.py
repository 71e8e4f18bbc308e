from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch import reachability
from hvd_cluster.launch.reachability import (
    HostAddresses,
    choose_addresses,
    listen_for_probes,
    probe,
    probers,
    unreachable,
)
from hvd_cluster.rendezvous.addresses import named, outward_interfaces
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret


def test_only_a_host_of_the_job_counts_as_an_answer() -> None:
    secret = new_secret()
    with contextlib.ExitStack() as stack:
        right = stack.enter_context(contextlib.closing(listen_for_probes(secret, "right")))
        stranger = stack.enter_context(contextlib.closing(listen_for_probes(new_secret(), "right")))
        other = stack.enter_context(contextlib.closing(listen_for_probes(secret, "other")))
        candidates = [
            HostAddresses("right", ("127.0.0.1", "127.0.0.9"), right.port),
            HostAddresses("right", ("127.0.0.1",), stranger.port),
            HostAddresses("absent", ("127.0.0.1",), other.port),
        ]
        assert probe(candidates[:1], secret) == {"right": ("127.0.0.1", "127.0.0.9")}
        assert probe(candidates[1:], secret) == {"right": (), "absent": ()}
    assert probe(candidates[:1], secret) == {"right": ()}


def test_silent_connections_do_not_block_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_MAX_PROBES", 2)
    secret = new_secret()
    with contextlib.closing(listen_for_probes(secret, "here")) as probe_listener, contextlib.ExitStack() as stack:

        def stranger() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", probe_listener.port)))

        first = stranger()
        assert first.recv(1000)  # its challenge; without it the connection was closed
        for _ in range(3):
            stranger()
        # A connection of the job does not wait until the strangers time out: it closes the oldest one.
        assert probe([HostAddresses("here", ("127.0.0.1",), probe_listener.port)], secret) == {"here": ("127.0.0.1",)}
        while first.recv(1000):
            pass


def test_a_dropped_probe_is_repeated() -> None:
    secret = new_secret()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            sock, _ = listener.accept()
            with sock:
                Channel.accept(sock, secret).send(b"here")

        thread = threading.Thread(target=serve)
        thread.start()
        candidate = HostAddresses("here", ("127.0.0.1",), listener.getsockname()[1])
        assert probe([candidate], secret) == {"here": ("127.0.0.1",)}
        thread.join()


def test_the_first_address_that_all_witnesses_reached_is_chosen() -> None:
    candidates = [
        HostAddresses("a", ("10.0.0.1", "10.1.0.1"), 1),
        HostAddresses("b", ("10.0.0.2",), 1),
        HostAddresses("c", ("10.0.0.3",), 1),
    ]
    reached = {
        "a": {"b": ("10.0.0.2",), "c": ("10.0.0.3",)},
        "b": {"a": ("10.1.0.1", "10.0.0.1"), "c": ("10.0.0.3",)},
        "c": {"a": ("10.1.0.1",), "b": ("10.0.0.2",)},
    }
    assert choose_addresses(candidates, reached) == ({"a": "10.1.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}, {})
    assert choose_addresses(candidates, {**reached, "b": {}})[0]["a"] == "10.1.0.1"  # b has gone


def test_a_host_that_no_one_reaches_is_named_with_who_tried() -> None:
    candidates = [HostAddresses("a", ("10.0.0.1",), 1), HostAddresses("b", ("10.0.0.2",), 1)]
    chosen, lost = choose_addresses(candidates, {"a": {"b": ()}, "b": {"a": ("10.0.0.1",)}})
    assert chosen == {"a": "10.0.0.1"}
    with pytest.raises(LaunchError, match=r"b has 10\.0\.0\.2; reached by a at none"):
        raise unreachable(lost)


def test_a_host_without_an_address_is_named() -> None:
    candidates = [HostAddresses("a", ("10.0.0.1",), 1), HostAddresses("b", (), 1)]
    _, lost = choose_addresses(candidates, {"a": {"b": ()}, "b": {"a": ("10.0.0.1",)}})
    assert lost["b"].startswith("b has no address except loopback and link-local ones; ")


def test_a_host_that_is_cut_off_is_left_out_alone() -> None:
    candidates = [HostAddresses(name, (f"10.0.0.{number}",), 1) for number, name in enumerate("abc", 1)]
    alone = {
        "a": {"b": (), "c": ("10.0.0.3",)},
        "b": {"a": (), "c": ()},
        "c": {"a": ("10.0.0.1",), "b": ()},
    }
    chosen, lost = choose_addresses(candidates, alone)
    assert chosen == {"a": "10.0.0.1", "c": "10.0.0.3"}
    assert lost == {"b": "b has 10.0.0.2; reached by c at none; a at none; it does not reach a, c"}
    deaf = {**alone, "a": {**alone["a"], "b": ("10.0.0.2",)}, "c": {**alone["c"], "b": ("10.0.0.2",)}}
    chosen, lost = choose_addresses(candidates, deaf)
    assert chosen == {"a": "10.0.0.1", "c": "10.0.0.3"}
    assert lost == {"b": "b has 10.0.0.2; reached by c at 10.0.0.2; a at 10.0.0.2; it does not reach a, c"}
    assert choose_addresses([], {}) == ({}, {})


def test_a_new_host_gives_way_to_one_that_is_part_of_the_job() -> None:
    candidates = [HostAddresses("a", ("10.0.0.1",), 1), HostAddresses("b", ("10.0.0.2",), 1)]
    for reached in ({"a": {"b": ()}, "b": {"a": ()}}, {"a": {"b": ("10.0.0.2",)}, "b": {"a": ()}}):
        assert list(choose_addresses(candidates, reached, known={"a"})[1]) == ["b"]
        assert list(choose_addresses(candidates, reached, known={"b"})[1]) == ["a"]


def test_of_a_hundred_hosts_those_are_left_out_that_are_cut_off() -> None:
    names = [f"h{index}" for index in range(100)]
    cut = {"h10", "h11", "h12", "h13", "h14", "h15", "h16", "h17", "h18", "h19", "h20"}  # all probers of h9
    reached = {
        caller: {
            name: ("10.0.0.1",) if name not in cut and caller not in cut else ()
            for name in names
            if caller in probers(names, name)
        }
        for caller in names
    }
    chosen, lost = choose_addresses([HostAddresses(name, ("10.0.0.1",), 1) for name in names], reached)
    assert set(lost) == cut
    assert set(chosen) == set(names) - cut


def test_every_host_has_witnesses_and_no_more_than_needed() -> None:
    names = [f"h{index}" for index in range(100)]
    assert {len(probers(names, name)) for name in names} == {8}
    assert probers(["a", "b"], "a") == ["b"]
    assert all(name not in probers(names, name) for name in names)


def test_interfaces_are_chosen_by_name_or_by_the_beginning_of_one() -> None:
    there = {"eth0": "10.0.0.1", "eth1": "10.1.0.1", "ib0": "10.2.0.1"}
    assert named(there, []) == there
    assert list(named(there, ["ib0", "ens5"])) == ["ib0"]
    assert list(named(there, ["eth"])) == ["eth0", "eth1"]
    assert named(there, ["wlan"]) == {}
    assert not any(address.startswith("127.") for address in outward_interfaces().values())
