from __future__ import annotations

import io
import re
import sys

from hvd_cluster.estimators.view.progress_bar import ProgressBar


def event(epoch, step, loss=0.5):
    return {"epoch": epoch, "epochs": 2, "step": step, "steps": 10, "loss": loss, "samples_per_s": 1234.5}


def test_one_bar_shows_epoch_loss_and_speed_of_rank_0():
    out = io.StringIO()
    with ProgressBar("run-1", file=out) as bar:
        bar(0, event(0, 4))
        bar(0, event(1, 10, loss=0.25))
        bar(0, {"user": "field"})
        bar(1, event(1, 10, loss=99.0))
    text = out.getvalue()
    for part in ("run-1", "20/20", "epoch 2/2", "loss 0.25", "samples/s"):
        assert part in text
    # tqdm draws seldom, but always the last state when the bar closes: that one would show rank 1's.
    assert set(re.findall(r"loss ([\d.]+)", text)) <= {"0.5", "0.25"}


def test_without_tqdm_each_tenth_gives_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    out = io.StringIO()
    with ProgressBar("run-1", file=out) as bar:
        for epoch in range(2):
            for step in range(1, 11):
                bar(0, event(epoch, step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1] == "run-1: step 20/20, epoch 2/2, loss 0.5, 1,234 samples/s"


def test_a_silent_or_finished_fit_shows_nothing():
    out = io.StringIO()
    with ProgressBar("run-1", enabled=False, file=out) as bar:
        bar(0, event(0, 1))
    bar(0, event(0, 2))
    assert out.getvalue() == ""


def test_a_resumed_run_starts_at_its_last_step():
    out = io.StringIO()
    with ProgressBar("run-1", file=out) as bar:
        bar(0, event(1, 1))
    assert "11/20" in out.getvalue()
