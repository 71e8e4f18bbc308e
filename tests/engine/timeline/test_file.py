"""The timeline's file is a complete JSON array at every moment, and its size is bounded."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.engine.timeline import Recorder, TimelineFile

MIB = 1 << 20


def span(i: int) -> tuple[int, int, bool, bytes]:
    return (0, 1, False, json.dumps({"name": f"e{i}", "ph": "X", "pid": 0, "tid": 1, "ts": i, "dur": 1}).encode())


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_the_file_is_complete_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "timeline.json"
    timeline = TimelineFile(path)
    assert read(path) == []
    for i in range(300):
        timeline.write([span(10 * i + j) for j in range(10)])
        if i % 20 == 0:
            assert [e["ts"] for e in read(path)] == list(range(10 * i + 10))
    assert path.stat().st_size > 2 << 16  # it has grown
    timeline.close()
    timeline.close()
    assert [e["ts"] for e in read(path)] == list(range(3000))
    assert path.read_text().endswith("}\n]\n")
    assert path.stat().st_size < 3000 * 80
    assert sorted(f.name for f in path.parent.iterdir()) == ["timeline.json"]


def test_a_new_file_replaces_the_old_one_and_its_elder(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for name in ("t.json", "t.older.json"):
        (tmp_path / name).write_text("old")
    timeline = TimelineFile(path)
    timeline.close()
    assert read(path) == []
    assert [f.name for f in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.long
def test_the_size_is_bounded_and_the_newest_events_stay_with_their_names(tmp_path: Path) -> None:
    path, older = tmp_path / "t.json", tmp_path / "t.older.json"
    timeline = TimelineFile(path, max_bytes=MIB)
    recorders = [Recorder(rank, "h") for rank in range(3)]
    for recorder in recorders:
        recorder.start()
    number = 0
    for _ in range(60):
        for recorder in recorders:
            for tensor in "ab":
                for _ in range(100):
                    recorder.span(tensor, str(number), 1.0, 2.0)
                    number += 1
            timeline.write(recorder.take())
        sizes = [file.stat().st_size for file in (path, older) if file.exists()]
        assert sum(sizes) <= MIB
    assert older.exists()
    spans = [int(e["name"]) for file in (older, path) for e in read(file) if e["ph"] == "X"]
    assert spans == list(range(spans[0], number)), "what is left is the newest, without a gap"
    assert len(spans) > 2500
    for file in (older, path):
        events = read(file)
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(tracks)
        assert ranks == {rank: f"rank {rank} (h)" for rank in {pid for pid, _ in tracks}}
    timeline.close()


def test_an_event_that_fits_no_page_is_left_out(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path / "t.json")
    timeline.write([span(0), (0, 1, False, json.dumps({"name": "x" * 5000}).encode()), span(1)])
    timeline.close()
    assert [e["ts"] for e in read(tmp_path / "t.json")] == [0, 1]


def test_what_is_not_a_regular_file_is_refused() -> None:
    with pytest.raises(OSError, match="regular file"):
        TimelineFile("/dev/null")
    assert Path("/dev/null").is_char_device()


WRITER = """
import sys
from hvd_cluster.engine.timeline import Recorder, TimelineFile
recorder = Recorder(0, "h")
recorder.start()
timeline = TimelineFile(sys.argv[1], max_bytes=1 << 20)
print("ready", flush=True)
while True:
    for i in range(500):
        recorder.span("t" + str(i % 7), "A_NAME_" * (1 + i % 9), 1.0, 2.0)
    timeline.write(recorder.take())
"""


def test_the_file_is_complete_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    choose = random.Random(3)
    path = tmp_path / "t.json"
    num_events = 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "ready\n"
            time.sleep(choose.uniform(0.0, 0.15))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        for file in tmp_path.glob("t*.json"):
            num_events += len(read(file))
    assert num_events > 10_000
