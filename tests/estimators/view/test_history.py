from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from hvd_cluster.estimators import TorchModel
from hvd_cluster.estimators.view.history import card, frame, rows
from hvd_cluster.monitor.step_clock import ACTIVITIES

RECORDS = [
    {
        "epoch": epoch,
        "train": {"loss": 4.0 - epoch, "all_metrics": []},
        "validation": {"loss": 5.0 - epoch, "all_metrics": [{"group_0_y": 0.5}]},
        "samples_per_s": [1000.0, 900.0],
        "data_wait_share": [0.25, 0.5],
        "seconds": 2.0,
    }
    for epoch in range(3)
]


def test_the_card_has_a_curve_for_each_part_and_a_row_for_each_rank():
    shown = card("TorchModel", "<mine>", RECORDS)
    assert "&lt;mine&gt;" in shown
    svg = ET.fromstring(re.search(r"<svg.*</svg>", shown)[0])
    curves = {curve.find("title").text: curve.get("points").split() for curve in svg.iter("polyline")}
    assert set(curves) == {"train loss", "validation loss"}
    heights = [float(point.split(",")[1]) for point in curves["train loss"]]
    assert heights == sorted(heights)  # a falling loss goes down
    assert "<td>1</td><td>900</td><td>50%</td>" in shown
    assert "3 epochs" in shown
    assert "(between 2 and 5)" in shown


def test_the_card_and_the_rows_have_what_the_steps_were_spent_on():
    shares = [dict.fromkeys(ACTIVITIES, 0.0) | {"data": share, "compute": 1 - share} for share in (0.0, 0.5)]
    record = {**RECORDS[0], "time_share": shares, "node_usage": {"node-a": {"cpu_percent": 93.0}}}
    shown = card("TorchModel", None, [record])
    assert "rank 1: waiting for data, 50.0%" in shown
    assert "node-a: CPU 93%" in shown
    (row,) = rows([record])
    assert (row["time_share_data"], row["time_share_compute"]) == (0.25, 0.75)


def test_the_card_of_many_ranks_lists_some_of_them():
    shown = card("TorchModel", None, [{**RECORDS[0], "samples_per_s": [1.0] * 100, "data_wait_share": [0.0] * 100}])
    assert "and 84 ranks more" in shown
    assert shown.count("<td>1</td>") == 17  # 16 rates, and rank 1


@pytest.mark.parametrize("records", [[], [{"epoch": 0, "train": {"loss": float("nan"), "all_metrics": []}}]])
def test_a_card_without_a_loss_has_no_curve(records):
    assert "<svg" not in card("TorchModel", None, records)


def test_losses_of_different_sizes_are_drawn_on_a_logarithmic_scale():
    def shown(*losses: float) -> str:
        return card("TorchModel", None, [{"epoch": i, "train": {"loss": loss}} for i, loss in enumerate(losses)])

    assert 'points="8.0,8.0 180.0,70.0 352.0,132.0"' in shown(100.0, 1.0, 0.01)
    assert "(between 0.01 and 100, logarithmic)" in shown(100.0, 1.0, 0.01)
    assert 'points="8.0,8.0 180.0,70.0 352.0,132.0"' in shown(3.0, 2.0, 1.0)
    assert "logarithmic" not in shown(1.0, 0.0) + shown(3.0, 2.0, 1.0)


def test_a_model_shows_and_plots_its_history():
    model = TorchModel(history=RECORDS, run_id="r")
    assert "<polyline" in model._repr_html_()
    import matplotlib as mpl

    with mpl.rc_context({"backend": "agg"}):
        import matplotlib.pyplot as plt

        axes = model.plot_history()
        assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
            "train": [4.0, 3.0, 2.0],
            "validation": [5.0, 4.0, 3.0],
        }
        assert [list(line.get_xdata()) for line in axes.lines] == [[0, 1, 2]] * 2  # as in the table beside it
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert model.plot_history(axes) is axes
        plt.close(axes.figure)
    assert model.history["validation_group_0_y"].tolist() == [0.5] * 3


TWO_EPOCHS = [
    {
        "epoch": 0,
        "train": {"loss": 0.5, "all_metrics": [{"group_0_y": 0.1}]},
        "validation": {"loss": 0.6, "all_metrics": [{"group_0_y": 0.2}]},
        "samples_per_s": [10.0, 20.0],
        "data_wait_share": [0.1, 0.3],
        "seconds": 2.0,
    },
    {"epoch": 1, "train": {"loss": 0.25, "all_metrics": []}},
]


def test_an_epoch_is_one_flat_row():
    first, second = rows(TWO_EPOCHS)
    assert first == {
        "epoch": 0,
        "train_loss": 0.5,
        "train_group_0_y": 0.1,
        "validation_loss": 0.6,
        "validation_group_0_y": 0.2,
        "samples_per_s": 30.0,
        "data_wait_share": 0.3,
        "seconds": 2.0,
    }
    assert second == {"epoch": 1, "train_loss": 0.25}


def test_the_frame_has_a_row_for_each_epoch():
    table = frame(TWO_EPOCHS)
    assert table["train_loss"].tolist() == [0.5, 0.25]
