from __future__ import annotations

import io
import re
import sys

from hvd_cluster.estimators.view.progress_bar import FitProgressBar
from hvd_cluster.estimators.view.time_shares import TimeShares
from hvd_cluster.monitor.step_clock import ACTIVITIES


def event(epoch, step, loss=0.5):
    return {"epoch": epoch, "epochs": 2, "step": step, "steps": 10, "loss": loss, "samples_per_s": 1234.5}


def test_one_bar_shows_epoch_loss_and_speed_of_rank_0():
    out = io.StringIO()
    with FitProgressBar("run-1", file=out) as bar:
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
    with FitProgressBar("run-1", file=out) as bar:
        for epoch in range(2):
            for step in range(1, 11):
                bar(0, event(epoch, step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1] == "run-1: step 20/20, epoch 2/2, loss 0.5, 1,234 samples/s"


def shares(verdict):
    ranks = {rank: dict.fromkeys(ACTIVITIES, 0.0) | {"compute": 0.75, "data": 0.25} for rank in range(2)}
    return {"time_shares": TimeShares.of_ranks(ranks, verdict).to_fields()}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_the_steps_are_spent_on_below_the_bar():
    out = Terminal()
    with FitProgressBar("run-1", file=out) as bar:
        bar(0, {**event(0, 4), **shares("All ranks wait.")})
        assert "compute 75%, data 25%. All" in out.getvalue()
    assert out.getvalue().endswith("run-1: compute 75%, data 25%. All ranks wait.\n")


def test_a_file_gets_what_the_steps_are_spent_on_once_at_the_end():
    out = io.StringIO()
    with FitProgressBar("run-1", file=out) as bar:
        bar(0, {**event(0, 4), **shares("All ranks wait.")})
        bar(0, event(0, 5))
        bar.show_epoch({"epoch": 0})
    assert out.getvalue().count("compute 75%") == 1
    assert out.getvalue().endswith("\nrun-1: compute 75%, data 25%. All ranks wait.\n")


def test_without_tqdm_a_line_says_what_the_steps_are_spent_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    out = Terminal()
    waited = {"data_wait_share": 0.01}  # since the epoch began, and of rank 0
    with FitProgressBar("run-1", file=out) as bar:
        bar(0, {**event(0, 4), **waited})
        bar(0, {**event(0, 10), **waited, **shares("All ranks wait.")})
    assert "step 4/20, epoch 1/2, loss 0.5, 1,234 samples/s, 1% waiting for data\n" in out.getvalue()
    assert "step 10/20, epoch 1/2, loss 0.5, 1,234 samples/s; compute 75%, data 25%. All ranks wait." in out.getvalue()


def test_a_fit_that_is_shorter_than_the_monitors_interval_shows_its_last_epoch(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    out = io.StringIO()
    with FitProgressBar("run-1", file=out) as bar:
        bar(0, event(0, 10))
        bar.show_epoch({"epoch": 0, "time_share": [dict.fromkeys(ACTIVITIES, 0.0) | {"data": 1.0}]})
    assert out.getvalue().endswith("\nrun-1: data 100%\n")


def test_a_silent_or_finished_fit_shows_nothing():
    out = io.StringIO()
    with FitProgressBar("run-1", enabled=False, file=out) as bar:
        bar(0, event(0, 1))
    bar(0, event(0, 2))
    assert out.getvalue() == ""


def test_a_resumed_run_starts_at_its_last_step():
    out = io.StringIO()
    with FitProgressBar("run-1", file=out) as bar:
        bar(0, event(1, 1))
    assert "11/20" in out.getvalue()
