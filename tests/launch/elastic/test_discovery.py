from __future__ import annotations

import pytest

from hvd_cluster.launch.elastic.discovery import FixedHosts, HostDiscoveryScript, parse_found
from hvd_cluster.launch.hosts import Host


@pytest.mark.processes
def test_a_script_prints_hosts_with_and_without_slots() -> None:
    text = "a:2\n\n  b \nme@c.example.com:4\nd:0\n"
    assert parse_found(text, 3) == {"a": 2, "b": 3, "me@c.example.com": 4}
    assert HostDiscoveryScript("printf 'a:2\\nb\\n'", 1).find_available_hosts_and_slots() == {"a": 2, "b": 1}


def test_another_line_is_refused() -> None:
    with pytest.raises(ValueError, match="printed 'a b', which is neither 'host' nor 'host:slots'"):
        parse_found("a b\n", 1)


@pytest.mark.processes
def test_a_script_that_fails_says_why() -> None:
    with pytest.raises(ValueError, match="exit 3 ended with exit code 3: no cloud today"):
        HostDiscoveryScript("echo no cloud today >&2; exit 3").find_available_hosts_and_slots()


def test_named_hosts_stay() -> None:
    assert FixedHosts([Host("a", 2), Host("b", 1)]).find_available_hosts_and_slots() == {"a": 2, "b": 1}
