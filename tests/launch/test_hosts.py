from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.launch import hosts
from hvd_cluster.launch.horovod.hosts import HostInfo, get_host_assignments
from hvd_cluster.launch.hosts import Host, fill, is_local, parse_hostfile, parse_hosts, read_hostfile


def test_hosts_and_slots_are_read() -> None:
    assert parse_hosts("worker-0:2, me@b.example.com:14,[fe80::1]:3") == [
        Host("worker-0", 2),
        Host("me@b.example.com", 14),
        Host("[fe80::1]", 3),
    ]
    assert [host.address for host in parse_hosts("me@b:1,[fe80::1]:3")] == ["b", "fe80::1"]


@pytest.mark.parametrize("text", ["worker", "worker:", "worker:x", "worker:0", "a:1;b:2", "", "a:1,", "a b:2"])
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="make sure it has format as : worker-0:2,worker-1:2"):
        parse_hosts(text)


def test_a_hostfile_is_read_as_open_mpi_and_mpich_write_it() -> None:
    text = "# the cluster\nworker-0 slots=2\nworker-1:4  # as MPICH has it\n\nworker-2\nworker-3 slots=8 max_slots=8\n"
    assert parse_hostfile(text) == [Host("worker-0", 2), Host("worker-1", 4), Host("worker-2", 1), Host("worker-3", 8)]


def test_addresses_in_a_hostfile_may_be_ipv6() -> None:
    text = "fe80::1 slots=2\n[fe80::2]:3\n[fe80::3]\nme@fe80::4\n"
    slots = {"fe80::1": 2, "[fe80::2]": 3, "[fe80::3]": 1, "me@fe80::4": 1}
    assert parse_hostfile(text) == [Host(name, count) for name, count in slots.items()]


def test_a_host_that_is_named_twice_offers_the_sum_of_its_slots() -> None:
    assert parse_hostfile("a\nb slots=1\n", slots=3) == [Host("a", 3), Host("b", 1)]
    assert parse_hostfile("a slots=1\nb slots=1\na slots=2\n") == [Host("a", 3), Host("b", 1)]


def test_all_wrong_lines_of_a_hostfile_are_named() -> None:
    with pytest.raises(ValueError, match=r"line 1: 'a slots=x'; line 3: 'b:2 slots=2'"):
        parse_hostfile("a slots=x\nc\nb:2 slots=2\n")
    for line in ("a:0", "b:two", "c: slots=2", "me@d:0", "1:2:3", "m;e@fe80::1"):
        with pytest.raises(ValueError, match=f"lines that are not like .*: line 1: '{line}'"):
            parse_hostfile(line)
    with pytest.raises(ValueError, match="has no hosts"):
        parse_hostfile("# nobody\n")


def test_a_hostfile_may_come_from_windows(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=2\r\nb slots=1\r\n")
    assert read_hostfile(str(tmp_path / "hosts")) == [Host("a", 2), Host("b", 1)]


def test_a_hostfile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the hostfile .*nowhere cannot be read"):
        read_hostfile(str(tmp_path / "nowhere"))


def test_hosts_are_filled_in_order_with_exactly_as_many_workers_as_asked_for() -> None:
    hosts = [Host("a", 2), Host("b", 4), Host("c", 1)]
    assert fill(hosts, 3) == [Host("a", 2), Host("b", 1)]
    assert fill(hosts, 7) == hosts


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Requested more processes \(4\) than there are available slots \(3\)"):
        fill([Host("a", 1), Host("b", 2)], 4)
    with pytest.raises(ValueError, match="-np=0 must be a whole number of at least 1"):
        fill([Host("a", 1)], 0)


@pytest.mark.parametrize("slots", ["2", 1.5, True, -1])
def test_slots_that_are_not_a_whole_number_are_refused_by_the_name_of_their_host(slots: Any) -> None:
    with pytest.raises(ValueError, match=rf"host a: slots={slots!r} must be a whole number of at least 0"):
        Host("a", slots)
    with pytest.raises(ValueError, match="host a: slots="):
        get_host_assignments([HostInfo("a", slots)], 1)
    with pytest.raises(ValueError, match=f"min_num_proc={slots!r} must be a whole number of at least 1"):
        get_host_assignments([HostInfo("a", 2)], slots)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.7", "::1", socket.gethostname()])
def test_this_host_is_known_by_its_names_and_addresses(name: str) -> None:
    assert is_local(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid", "somebody@localhost"])
def test_other_hosts_and_other_users_are_not_this_host(name: str) -> None:
    assert not is_local(name)


def test_an_address_of_a_family_that_this_host_has_not_is_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def without_ipv6(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return made(family, kind)

    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::7", 0, 0, 0))]
    monkeypatch.setattr(hosts.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(hosts.socket, "socket", without_ipv6)
    assert not is_local("elsewhere")
