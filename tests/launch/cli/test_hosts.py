from __future__ import annotations

import socket

import pytest

from hvd_cluster.launch.cli.hosts import local_seats, parse_hosts


def test_hosts_and_slots_are_read() -> None:
    assert parse_hosts("worker-0:2, b.example.com:14") == [("worker-0", 2), ("b.example.com", 14)]


@pytest.mark.parametrize("text", ["worker", "worker:", "worker:x", "worker:0", "a:1;b:2", "", "a:1,"])
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="make sure it has format as : worker-0:2,worker-1:2"):
        parse_hosts(text)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_exactly_as_many_workers_as_asked_for_start_even_with_more_slots(name: str) -> None:
    seats = local_seats(3, [(name, 5)])
    assert [seat.index for seat in seats] == [0, 1, 2]
    assert len({seat.host_key for seat in seats}) == 1


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Requested more processes \(4\) than there are available slots \(3\)"):
        local_seats(4, [("localhost", 1), ("127.0.0.1", 2)])


def test_another_host_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"other hosts \(faraway\) is not available in this version"):
        local_seats(1, [("localhost", 1), ("faraway", 2)])


def test_no_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="-np must be at least 1, not 0"):
        local_seats(0)
