from __future__ import annotations

from hvd_cluster.estimators.view import history

RECORDS = [
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
    first, second = history.rows(RECORDS)
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
    frame = history.frame(RECORDS)
    assert frame["train_loss"].tolist() == [0.5, 0.25]
