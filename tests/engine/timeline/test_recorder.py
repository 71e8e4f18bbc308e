"""What a recorder keeps: spans with their tracks, a bounded number of events and of tracks."""

import itertools
import json
import threading
import time
from typing import Any

import pytest

from hvd_cluster.engine.timeline import Recorder


def taken(recorder: Recorder) -> list[dict[str, Any]]:
    return [json.loads(line) for _, _, _, line in recorder.take()]


def test_spans_carry_their_track_and_length() -> None:
    recorder = Recorder(3, "node-a")
    recorder.start()
    now_s = time.monotonic()
    recorder.span("allreduce.x", "NEGOTIATE_ALLREDUCE", now_s, now_s + 0.25, dtype="float32")
    with recorder.phase(["allreduce.x", "allreduce.y"], "MEMCPY_IN_FUSION_BUFFER"):
        pass
    events = taken(recorder)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["allreduce.x", "allreduce.y"]
    assert events[0]["args"]["name"] == "rank 3 (node-a)"
    (negotiated,) = [e for e in events if e["name"] == "NEGOTIATE_ALLREDUCE"]
    assert (tracks[negotiated["tid"]], negotiated["pid"], negotiated["dur"]) == ("allreduce.x", 3, 250_000)
    assert negotiated["args"] == {"dtype": "float32"}
    assert abs(negotiated["ts"] / 1e6 - time.time()) < 5
    assert sum(e["name"] == "MEMCPY_IN_FUSION_BUFFER" for e in events) == 2
    assert recorder.take() == []


def test_a_rank_that_has_to_wait_between_its_clocks_stands_where_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_of(recorder: Recorder) -> int:
        recorder.start()
        recorder.span("x", "X", 1.0, 2.0)
        (start_us,) = [e["ts"] for e in taken(recorder) if e["name"] == "X"]
        return int(start_us)

    usual_us = start_of(Recorder(0, "h"))
    clock, readings = time.time_ns, itertools.count()

    def slow_clock() -> int:
        wall_ns = clock()
        if next(readings) != 5:
            time.sleep(0.02)  # the thread loses its core
        return wall_ns

    monkeypatch.setattr(time, "time_ns", slow_clock)
    assert abs(start_of(Recorder(1, "h")) - usual_us) < 1000


def test_a_recorder_that_was_not_started_or_was_stopped_records_nothing() -> None:
    recorder = Recorder(0, "h")
    recorder.span("t", "x", 0.0, 1.0)
    with recorder.phase(["t"], "y"):
        pass
    recorder.start()
    recorder.take()
    recorder.stop()
    recorder.span("t", "x", 0.0, 1.0)
    recorder.mark_cycle()
    assert recorder.take() == []


def test_cycles_are_marked_where_that_was_asked_for() -> None:
    recorder = Recorder(0, "h")
    for marks in (False, True):
        recorder.start(mark_cycles=marks)
        recorder.mark_cycle()
        assert [e["name"] for e in taken(recorder) if e["ph"] == "i"] == ["CYCLE_START"] * marks


@pytest.mark.long
def test_events_beyond_a_bound_are_counted_and_forgotten() -> None:
    recorder = Recorder(0, "h")
    recorder.start()
    for _ in range(20_003):
        recorder.span("t", "x", 1.0, 2.0)
    events = taken(recorder)
    assert sum(e["name"] == "x" for e in events) == 20_000
    assert [e["name"] for e in events if e["ph"] == "i"] == ["DROPPED 3 EVENTS"]
    recorder.span("t", "x", 1.0, 2.0)
    assert [e["name"] for e in taken(recorder)] == ["x"]


@pytest.mark.long
def test_unnamed_operations_share_a_track_and_so_do_too_many_tensors() -> None:
    recorder = Recorder(0, "h")
    recorder.start()
    for i in range(6000):
        recorder.span(f"allreduce.noname.{i}", "x", 1.0, 2.0)
        recorder.span(f"t{i}", "x", 1.0, 2.0)
    events = taken(recorder)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(tracks) == 4097
    assert {"allreduce.noname", "more tensors", "t0"} <= set(tracks.values())
    used = [tracks[e["tid"]] for e in events if e["ph"] == "X"]
    assert used.count("allreduce.noname") == 6000
    assert used.count("more tensors") == 6000 - 4095


@pytest.mark.long
def test_threads_may_record_while_another_takes() -> None:
    recorder = Recorder(0, "h")
    recorder.start()

    def record(thread: int) -> None:
        for i in range(4000):
            recorder.span(f"t{thread}", str(i), 1.0, 2.0)

    threads = [threading.Thread(target=record, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    events = []
    while any(thread.is_alive() for thread in threads):
        events += taken(recorder)
    events += taken(recorder)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for thread in range(4):
        assert [e["name"] for e in events if e["ph"] == "X" and tracks[e["tid"]] == f"t{thread}"] == [
            str(i) for i in range(4000)
        ]
