"""The timeline's file is a complete JSON array after every write, and its lanes carry the names of the tensors."""

import json
import time
from pathlib import Path

from hvd_cluster.engine.timeline import Recorder, TimelineFile


def test_the_file_is_valid_json_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "timeline.json"
    timeline = TimelineFile(path)
    assert json.loads(path.read_text()) == []
    written = []
    for i in range(3):
        event = {"name": f"e{i}", "ph": "i"}
        timeline.write([event, event])
        written += [event, event]
        assert json.loads(path.read_text()) == written
    timeline.close()
    timeline.close()


def test_spans_carry_their_lane_and_length() -> None:
    recorder = Recorder(3, "node-a")
    recorder.start()
    now_s = time.monotonic()
    recorder.span("allreduce.x", "NEGOTIATE_ALLREDUCE", now_s, now_s + 0.25)
    with recorder.phase(["allreduce.x", "allreduce.y"], "MEMCPY_IN_FUSION_BUFFER"):
        pass
    events = recorder.take()
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["allreduce.x", "allreduce.y"]
    assert events[0]["args"]["name"] == "rank 3 (node-a)"
    (negotiated,) = [e for e in events if e["name"] == "NEGOTIATE_ALLREDUCE"]
    assert (lanes[negotiated["tid"]], negotiated["pid"], negotiated["dur"]) == ("allreduce.x", 3, 250_000)
    assert abs(negotiated["ts"] / 1e6 - time.time()) < 5
    assert recorder.take() == []


def test_a_recorder_that_was_not_started_or_was_stopped_records_nothing() -> None:
    recorder = Recorder(0, "h")
    recorder.span("t", "x", 0.0, 1.0)
    recorder.start()
    recorder.take()
    recorder.stop()
    recorder.span("t", "x", 0.0, 1.0)
    recorder.mark_cycle()
    assert recorder.take() == []
