"""``hvdrun timeline FILE``: the table, the picture, and what it says where there is nothing to see."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvd_cluster.engine.timeline import Recorder, TimelineFile
from hvd_cluster.launch.cli.main import main


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    file = TimelineFile(tmp_path / "run.json")
    for rank in range(2):
        recorder = Recorder(rank, "node")
        recorder.start()
        recorder.span("allreduce.x", "NEGOTIATE_ALLREDUCE", 1.0 + 0.25 * rank, 1.5)
        recorder.span("allreduce.x", "SHM_ALLREDUCE", 1.5, 2.0)
        file.write(recorder.take())
    file.close()
    return tmp_path / "run.json"


@pytest.mark.long
def test_the_table_is_printed_and_the_picture_lies_beside_the_file(
    timeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(timeline)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 ranks, 1.00 s\n")
    assert "rank 1 (node) was the last to submit in 1 of 1 operations; the others waited 250.00 ms for it." in out
    picture = timeline.with_suffix(".png")
    assert f"Picture: {picture}" in out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_there_is_a_table_and_the_reason(
    timeline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["timeline", str(timeline)]) == 0
    captured = capsys.readouterr()
    assert "SHM_ALLREDUCE" in captured.out
    assert "No picture: matplotlib is not installed, but is needed to draw it" in captured.err
    assert not timeline.with_suffix(".png").exists()


def test_what_is_not_a_timeline_is_an_error_of_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("hello")
    TimelineFile(tmp_path / "empty.json").close()
    expected = {"absent": "No such file", "text": "is not a timeline", "empty.json": "no operations yet"}
    for name, words in expected.items():
        assert main(["timeline", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err
