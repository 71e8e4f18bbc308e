"""The card of a fit in a notebook: its states, and what a real notebook keeps of it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from hvd_cluster.estimators.view import live_card
from hvd_cluster.estimators.view.live_card import LiveCard
from hvd_cluster.estimators.view.progress_bar import FitProgressBar
from hvd_cluster.estimators.view.time_shares import TimeShares
from hvd_cluster.monitor.step_clock import ACTIVITIES

SHARES = {rank: dict.fromkeys(ACTIVITIES, 0.0) | {"compute": 0.75, "data": 0.25} for rank in range(2)}
STEP = {"epoch": 1, "epochs": 2, "step": 5, "steps": 10, "loss": 0.5}
RECORD = {
    "epoch": 1,
    "time_share": list(SHARES.values()),
    "node_usage": {"node-a": {"cpu_percent": 93.2, "memory_percent": 41.0, "gpu0_percent": 88.0}},
}


class Display:
    """What IPython shows: every state of the one output."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def __call__(self, data, *, raw, display_id):
        assert raw
        assert display_id
        self.states.append(data["text/html"])
        return self

    def update(self, data, *, raw):
        assert raw
        self.states.append(data["text/html"])


@pytest.fixture
def display(monkeypatch):
    monkeypatch.setattr(live_card, "_INTERVAL_S", 0.0)
    return Display()


def test_the_card_shows_the_recent_steps_and_the_verdict(display):
    card = LiveCard("run-1", display)
    card.show_step(STEP, "epoch 2/2, loss 0.5", TimeShares.of_ranks(SHARES, "All ranks wait for data."))
    (state,) = display.states
    ET.fromstring(state)
    for part in ("run-1", "training", "15 of 20 steps", "epoch 2/2, loss 0.5", "rank 1", "All ranks wait for data."):
        assert part in state
    assert "script" not in state


def test_without_a_report_of_the_monitor_the_card_shows_the_last_epoch(display):
    card = LiveCard("run-1", display)
    card.show_step(STEP, "", None)
    assert "rank 1" not in display.states[-1]
    card.show_epoch(RECORD)
    assert "in epoch 2" in display.states[-1]
    assert "rank 1" in display.states[-1]
    assert "node-a: CPU 93%, memory 41%, GPU 0 88%" in display.states[-1]


@pytest.mark.parametrize("error", [None, KeyError("x")])
def test_the_last_state_says_how_the_fit_ended(display, error):
    bar = FitProgressBar("run-1")
    bar._card = LiveCard("run-1", display)
    with contextlib.suppress(KeyError), bar:
        bar(0, {**STEP, "step": 10, "time_shares": TimeShares.of_ranks(SHARES).to_fields()})
        bar.show_epoch(RECORD)
        if error is not None:
            raise error
    assert ("finished" if error is None else "failed") in display.states[-1]
    assert "20 of 20 steps" in display.states[-1]


def test_an_executed_notebook_keeps_the_last_state_and_no_other():
    notebook = json.loads((Path(__file__).parents[3] / "notebooks" / "1_spark_estimator.ipynb").read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    shown = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    (card,) = [html for html in shown if any(f">{state}<" in html for state in ("training", "finished", "failed"))]
    ET.fromstring(card)
    for part in ("finished", "epoch 6/6", "rank 1"):
        assert part in card


def test_a_process_that_is_not_a_notebook_has_no_card():
    assert LiveCard.in_notebook("run-1") is None
