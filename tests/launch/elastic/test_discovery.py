from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from hvd_cluster.launch.elastic import discovery
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


@pytest.mark.processes
def test_a_script_that_leaves_a_process_with_its_output_open_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "_SCRIPT_TIMEOUT_S", 10.0)
    script = HostDiscoveryScript(f"sleep 60 & echo $! > {tmp_path}/pid; echo localhost:1")
    assert script.find_available_hosts_and_slots() == {"localhost": 1}
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.processes
def test_a_script_that_does_not_end_is_killed_with_what_it_has_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "_SCRIPT_TIMEOUT_S", 0.5)
    with pytest.raises(ValueError, match="did not exit within 0.5 s"):
        HostDiscoveryScript(f"sleep 300 & echo $! > {tmp_path}/pid; wait").find_available_hosts_and_slots()
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_named_hosts_stay() -> None:
    assert FixedHosts([Host("a", 2), Host("b", 1)]).find_available_hosts_and_slots() == {"a": 2, "b": 1}
