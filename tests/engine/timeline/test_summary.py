"""The numbers of a timeline whose spans are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_cluster.engine.timeline import Recorder, TimelineFile
from hvd_cluster.engine.timeline.summary import summarize, table
from hvd_cluster.engine.timeline.trace import Span, Trace, common, length, read, union
from hvd_cluster.monitor.call_sites import CallSite
from hvd_cluster.monitor.rank_report import RankReport
from hvd_cluster.monitor.step_clock import COMPUTE, DATA, StepTime, step_clock

#: Where a rank was while others waited for it.
WHERE = ((CallSite("forward (train.py:1)", COMPUTE), 9), (CallSite("read (train.py:2)", DATA), 5))


def test_unions_merge_what_overlaps_and_what_they_share_is_counted_once() -> None:
    merged = union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)])
    assert merged == [(0.0, 4.0), (5.0, 6.0)]
    assert length(merged) == 5.0
    assert common(merged, [(1.0, 1.5), (3.5, 5.25), (5.5, 9.0)]) == pytest.approx(0.5 + 0.5 + 0.25 + 0.5)
    assert common(merged, []) == 0.0


def trace() -> Trace:
    spans = []
    # Rank 2 submits x half a second after rank 1, and y first; rank 0 always submits at once.
    for step in range(4):
        t = 10.0 * step
        starts = {("x", 0): t, ("x", 1): t + 1.0, ("x", 2): t + 1.5, ("y", 0): t, ("y", 1): t + 0.25, ("y", 2): t}
        spans += [Span(rank, name, "NEGOTIATE_ALLREDUCE", at, t + 2.0) for (name, rank), at in starts.items()]
        for rank in range(3):
            # Two tensors in one bucket: one second of communication, not two.
            spans += [Span(rank, name, "GLOO_ALLREDUCE", t + 2.0, t + 3.0) for name in "xy"]
            spans.append(Span(rank, "backward", "BACKWARD", t, t + 2.0 + 0.25 * rank))
    return Trace(sorted(spans, key=lambda s: s.end_s), {0: "rank 0 (a)", 1: "rank 1 (a)", 2: "rank 2 (b)"}, 7)


def test_time_is_counted_once_however_many_tensors_share_it() -> None:
    phases = {phase.name: phase for phase in summarize(trace()).phases}
    assert phases["GLOO_ALLREDUCE"].seconds == pytest.approx({0: 4.0, 1: 4.0, 2: 4.0})
    assert phases["GLOO_ALLREDUCE"].num_spans == 24
    assert phases["NEGOTIATE_ALLREDUCE"].seconds == pytest.approx({0: 8.0, 1: 7.0, 2: 8.0})
    assert phases["BACKWARD"].longest == 2


def test_the_slowest_rank_is_the_one_that_the_others_waited_for() -> None:
    found = summarize(trace())
    assert found.num_operations == 8
    first, second, third = found.stragglers
    assert (first.rank, first.num_last, first.late_s) == (2, 4, pytest.approx(2.0))
    assert (second.rank, second.num_last, second.late_s) == (1, 4, pytest.approx(1.0))
    assert (third.rank, third.num_last) == (0, 0)


def test_a_rank_that_is_late_with_a_whole_bucket_is_so_once() -> None:
    starts = {0: 0.0, 1: 1.0}
    spans = [Span(rank, name, "NEGOTIATE_ALLREDUCE", at, 1.5) for rank, at in starts.items() for name in "xyz"]
    late = summarize(Trace(spans, {0: "rank 0", 1: "rank 1"})).stragglers[0]
    assert (late.rank, late.num_last, late.late_s) == (1, 3, pytest.approx(1.0))


def test_communication_during_backward_is_a_share_of_all_communication() -> None:
    found = summarize(trace())
    assert found.communication_s == pytest.approx({0: 4.0, 1: 4.0, 2: 4.0})
    assert found.overlap == pytest.approx({1: 0.25, 2: 0.5, 0: 0.0})


def test_launches_on_a_gpu_are_not_taken_for_communication_during_backward() -> None:
    found = trace()
    spans = [Span(s.rank, s.track, s.name.replace("GLOO", "NCCL"), s.start_s, s.end_s) for s in found.spans]
    told = summarize(Trace(spans, found.ranks, found.num_cycles))
    assert told.overlap == {}
    assert "on GPUs a timeline shows launches; use torch.profiler." in table(told)


def test_the_table_says_it_in_words() -> None:
    text = table(summarize(trace()))
    assert "3 ranks, 33.00 s, 7 cycles" in text
    assert "rank 2 (b) was the last to submit in 4 of 8 operations; the others waited 2.00 s for it." in text
    assert "rank 2 50%" in text
    one = table(summarize(Trace([Span(0, "x", "NEGOTIATE_ALLREDUCE", 0.0, 0.5)], {0: "rank 0"})))
    assert "this timeline has no operation that two or more ranks have negotiated" in one
    assert "does not show both" in one


def test_training_steps_are_read_back_and_explained_as_the_monitor_does(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path / "t.json", max_bytes=1 << 20)
    waiting = StepTime(0.0, 0.01, 0.04, 0.0, 0.0, 0.0, 0.0)
    late = StepTime(0.04, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0)
    for rank, times in enumerate((waiting, late)):
        recorder = Recorder(rank, "node")
        recorder.start()
        assert step_clock.observer is recorder
        for number in range(5 + rank):
            recorder.note_activity(COMPUTE, number, number + 0.01)
            recorder.note_step(number, number, number + 0.05, times)
        recorder.note_report(RankReport(rank, b"", b"", (0, waiting), WHERE, 0.0, 0.25))
        recorder.stop()
        assert step_clock.observer is None
        timeline.write(recorder.take())
    timeline.close()
    found = summarize(read(tmp_path / "t.json"))
    assert {rank: len(steps) for rank, steps in found.steps.items()} == {0: 5, 1: 5}
    assert (found.bottlenecks[0].rank, found.bottlenecks[0].activity) == (1, DATA)
    text = table(found)
    assert "5 training steps:" in text
    assert (
        "Rank 1 (node) was last in 100% of the steps, by 40.0 ms on average; the cause is waiting for data: it was in "
        "read (train.py:2)."
    ) in text
    assert "STEP" not in text
    assert "REPORT" not in text


def timeline_of(folder: Path, *ranks: tuple[StepTime, float]) -> str:
    """The table of a timeline with two steps of each rank, of equal times, and for how long it had no core."""
    timeline = TimelineFile(folder / "t.json", max_bytes=1 << 20)
    for rank, (times, core_wait_s) in enumerate(ranks):
        recorder = Recorder(rank, "node")
        recorder.start()
        recorder.note_step(1, 1.0, 1.05, times)
        recorder.note_step(2, 2.0, 2.05, times)
        recorder.note_report(RankReport(rank, b"", b"", (2, times), (), core_wait_s, 1.0))
        recorder.stop()
        timeline.write(recorder.take())
    timeline.close()
    return table(summarize(read(folder / "t.json")))


def test_a_rank_that_waits_for_a_core_is_named_so(tmp_path: Path) -> None:
    waiting, late = StepTime(0.0, 0.01, 0.04, 0.0, 0.0, 0.0, 0.0), StepTime(0.0, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert "Rank 1 (node) was last in 100% of the steps, by 40.0 ms on average; its process waits for a core" in (
        timeline_of(tmp_path, (waiting, 0.0), (late, 0.7))
    )


def test_the_last_rank_of_each_step_is_counted_where_no_rank_is_a_bottleneck(tmp_path: Path) -> None:
    usual, barely_late = StepTime(0.0, 0.05, 0.001, 0.0, 0.0, 0.0, 0.0), StepTime(0.0, 0.051, 0.0, 0.0, 0.0, 0.0, 0.0)
    text = timeline_of(tmp_path, (usual, 0.0), (barely_late, 0.0))
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("rank ")] == ["0%", "100%"]
    assert "was last" not in text


def test_a_written_timeline_is_read_back_with_its_elder(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline = TimelineFile(path, max_bytes=1 << 18)
    recorder = Recorder(1, "node")
    recorder.start(mark_cycles=True)
    for i in range(2500):
        recorder.span("allreduce.x", "ALLREDUCE", i, i + 0.5)
        if i % 100 == 0:
            timeline.write(recorder.take())
    timeline.write(recorder.take())
    timeline.close()
    assert (tmp_path / "t.older.json").exists()
    found = read(path)
    assert {(s.rank, s.track, s.name) for s in found.spans} == {(1, "allreduce.x", "ALLREDUCE")}
    gaps = {round(b.start_s - a.start_s, 3) for a, b in zip(found.spans, found.spans[1:], strict=False)}
    assert gaps == {1.0}
    assert found.ranks == {1: "rank 1 (node)"}


@pytest.mark.parametrize("text", ['{"a": ', "[\n[1]\n]", '[\n{"ph": "X"}\n]'])
def test_what_is_not_a_timeline_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match="is not a timeline of hvd_cluster"):
        read(tmp_path / "t.json")
