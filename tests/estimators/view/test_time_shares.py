from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from hvd_cluster.estimators.view.time_shares import TimeShares
from hvd_cluster.monitor.step_clock import ACTIVITIES

SVG = "{http://www.w3.org/2000/svg}"
#: Ranks wait for rank 2, which waits for its data.
RANKS = {
    rank: dict.fromkeys(ACTIVITIES, 0.0) | {"compute": 0.5, "data" if rank == 2 else "late": 0.5} for rank in range(3)
}


def bars(shares: TimeShares) -> list[tuple[str, float]]:
    """What each part of a bar says, and its width."""
    svg = ET.fromstring(shares.svg())
    rects = svg.findall(f"{SVG}rect")
    return [(rect.find(f"{SVG}title").text, float(rect.get("width"))) for rect in rects]


def test_each_rank_has_a_bar_whose_parts_are_its_shares():
    texts = [text for text, _ in bars(TimeShares.of_ranks(RANKS))]
    assert texts == [
        "rank 0: forward and backward, 50.0%",
        "rank 0: waiting for late ranks, 50.0%",
        "rank 1: forward and backward, 50.0%",
        "rank 1: waiting for late ranks, 50.0%",
        "rank 2: forward and backward, 50.0%",
        "rank 2: waiting for data, 50.0%",
    ]
    assert len({width for _, width in bars(TimeShares.of_ranks(RANKS))}) == 1


def test_of_many_ranks_those_that_the_others_wait_for_are_drawn():
    many = {rank: RANKS[2] if rank == 70 else RANKS[0] for rank in range(100)}
    shares = TimeShares.of_ranks(many)
    assert len(shares.ranks) == 16
    assert 70 in shares.ranks
    assert list(shares.ranks) == sorted(shares.ranks)
    assert "and 84 ranks that wait longer for others" in shares.svg()
    assert shares.mean["data"] == pytest.approx(0.005)  # of all ranks


def test_the_line_names_the_largest_shares_first_and_ends_with_the_verdict():
    shares = TimeShares.of_ranks(RANKS, "Rank 2 on node-b was last.")
    assert shares.text() == "compute 50%, late 33%, data 17%. Rank 2 on node-b was last."


def test_shares_are_the_same_after_a_report():
    shares = TimeShares.of_ranks(RANKS, "Rank 2 was last.")
    back = TimeShares.from_fields(json.loads(json.dumps(shares.to_fields())))
    assert (back.ranks, back.num_others, back.verdict) == (shares.ranks, 0, shares.verdict)
    assert back.mean == pytest.approx(shares.mean, abs=1e-4)


def test_a_card_has_no_script_and_escapes_the_verdict():
    card = TimeShares.of_ranks(RANKS, "it was in <lambda> (train.py:3).").html("Recent steps")
    assert "it was in &lt;lambda&gt;" in card
    assert "script" not in card
    ET.fromstring(f"<div>{card}</div>")


@pytest.mark.parametrize("record", [{}, {"time_share": []}, {"time_share": [dict.fromkeys(ACTIVITIES, 0.0)]}])
def test_a_record_without_measured_steps_has_no_shares(record):
    assert TimeShares.of_record(record) is None
