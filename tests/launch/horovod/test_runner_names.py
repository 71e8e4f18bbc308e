"""The small parts of Horovod's launcher that programs import, over ours."""

from __future__ import annotations

import threading
import time

import pytest

from hvd_cluster.errors import StartTimeoutError
from hvd_cluster.launch.horovod import (
    codec,
    config_parser,
    hosts,
    network,
    secret,
    settings,
    threads,
    timeout,
    variables,
)
from hvd_cluster.launch.horovod.arguments import _HorovodArgs


def test_slots_are_assigned_in_the_order_of_hosts() -> None:
    found = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1,c:4"), 4)
    places = [(slot.hostname, slot.rank, slot.local_rank, slot.cross_rank) for slot in found]
    assert places == [("a", 0, 0, 0), ("a", 1, 1, 0), ("b", 2, 0, 1), ("c", 3, 0, 2)]
    assert [(slot.size, slot.local_size, slot.cross_size) for slot in found] == [
        (4, 2, 3),
        (4, 2, 1),
        (4, 1, 3),
        (4, 1, 3),
    ]
    assert found[2].to_response_string() == "2,4,0,1,1,3"
    assert found[2] == hosts.SlotInfo("b", 2, 0, 1, 4, 1, 3)


def test_an_elastic_assignment_takes_all_slots_up_to_the_most() -> None:
    named = hosts.parse_hosts("a:2,b:2")
    assert [len(hosts.get_host_assignments(named, 1, most)) for most in (3, 10, None)] == [3, 4, 1]
    with pytest.raises(ValueError, match=r"Requested more processes \(5\) than there are available slots \(4\)"):
        hosts.get_host_assignments(named, 5)


def test_hosts_are_read_from_text_and_files(tmp_path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    assert hosts.parse_host_files(str(tmp_path / "hosts")) == "a:2,b:1"
    assert hosts.parse_hosts_and_slots("a:2,b:1") == (["a", "b"], {"a": 2, "b": 1})
    assert hosts.HostInfo.from_string("a:2") == hosts.HostInfo(hostname="a", slots=2)
    with pytest.raises(ValueError, match="Invalid host input"):
        hosts.parse_hosts("a")


def test_a_digest_holds_for_its_key_and_message_only() -> None:
    key = secret.make_secret_key()
    digest = secret.compute_digest(key, b"message")
    assert len(digest) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"message", digest)
    assert not secret.check_digest(key, b"other", digest)
    assert not secret.check_digest(secret.make_secret_key(), b"message", digest)


def test_a_timeout_says_what_took_so_long() -> None:
    over = timeout.Timeout(-1, "Timed out waiting for {activity}: {timeout}")
    assert over.timed_out()
    assert over.remaining() == 0
    with pytest.raises(StartTimeoutError, match="Timed out waiting for hosts: -1"):
        over.check_time_out_for("hosts")
    running = timeout.Timeout(1000, "{activity}")
    running.check_time_out_for("hosts")
    assert 0 < running.remaining() <= 1000
    assert running.timeout_at() > time.time()


def test_settings_hold_what_they_are_given() -> None:
    given = settings.Settings(num_proc=2, hosts="a:2", key=b"k", verbose=2)
    assert (given.num_proc, given.hosts, given.key, given.verbose, given.nics, given.elastic) == (
        2,
        "a:2",
        b"k",
        2,
        None,
        False,
    )
    elastic = settings.ElasticSettings(
        discovery=None, min_num_proc=1, max_num_proc=4, elastic_timeout=600, reset_limit=None, num_proc=2
    )
    assert (elastic.elastic, elastic.max_num_proc, elastic.num_proc) == (True, 4, 2)


def test_addresses_are_those_of_this_host() -> None:
    assert "127.0.0.1" in network.get_local_host_addresses()
    assert "lo" in network.get_local_host_intfs()
    assert network.filter_local_addresses(["localhost", "nowhere.invalid"]) == ["nowhere.invalid"]
    assert network.resolve_host_address("nowhere.invalid") is None
    assert network.get_driver_ip(["lo"]) == "127.0.0.1"
    with pytest.raises(RuntimeError, match="no address on nics="):
        network.get_driver_ip(["none0"])


def test_functions_run_in_threads() -> None:
    assert threads.execute_function_multithreaded(lambda a, b: a + b, [(1, 2), (3, 4)]) == {0: 3, 1: 7}
    event, called = threading.Event(), []
    thread = threads.on_event(event, called.append, ("x",))
    assert thread.is_alive()
    event.set()
    thread.join(10)
    threads.in_thread(called.append, ("y",)).join(10)
    threads.in_thread(lambda: 1 / 0, silent=True).join(10)
    assert called == ["x", "y"]
    with pytest.raises(ValueError, match="args must be a tuple or a list"):
        threads.in_thread(print, "x")


def test_objects_travel_as_base64() -> None:
    text = codec.dumps_base64({"a": (1, None)})
    assert isinstance(text, str)
    assert codec.loads_base64(text) == codec.loads_base64(text.encode()) == {"a": (1, None)}


def test_rank_and_size_are_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert variables.get_env_rank_and_size() == (3, 4)
    assert variables.is_exportable("PATH")
    assert not variables.is_exportable("BASH_FUNC_x%%")


def test_a_config_file_fills_what_the_command_line_left_open() -> None:
    args = _HorovodArgs(cycle_time_ms=3.0)
    config = {"params": {"fusion_threshold_mb": 32, "cycle_time_ms": 10}, "stall_check": {"enabled": False}}
    config_parser.set_args_from_config(args, config, {"cycle_time_ms"})
    config_parser.validate_config_args(args)
    assert config_parser.set_env_from_args({"PATH": "p"}, args) == {
        "PATH": "p",
        config_parser.HOROVOD_FUSION_THRESHOLD: str(32 * 2**20),
        config_parser.HOROVOD_CYCLE_TIME: "3.0",
        config_parser.HOROVOD_STALL_CHECK_DISABLE: "1",
    }
    args.cycle_time_ms = -1.0
    with pytest.raises(ValueError, match=r"cycle-time-ms=-1.0 must be >= 0"):
        config_parser.validate_config_args(args)
