"""The numbers of an epoch, by their names in MLflow."""

from __future__ import annotations

import pytest

from hvd_cluster.estimators.view.tracking import epoch_metrics
from hvd_cluster.monitor.step_clock import ACTIVITIES


def test_the_shares_of_each_rank_and_the_usage_of_each_host_are_metrics():
    shares = [dict.fromkeys(ACTIVITIES, 0.0) | {"data": share, "compute": 1 - share} for share in (0.25, 0.75)]
    found = epoch_metrics(
        {
            "epoch": 3,
            "train": {"loss": 0.5},
            "time_share": shares,
            "node_usage": {"node-a": {"cpu_percent": 93.0}, "fe80::1": {"memory_percent": 41.0}},
        }
    )
    assert found["train_loss"] == found["time_share_data"] == 0.5
    assert (found["time_share/rank0/data"], found["time_share/rank1/data"]) == (0.25, 0.75)
    assert found["system/node-a/cpu_percent"] == 93.0
    assert found["system/fe80__1/memory_percent"] == 41.0
    assert "epoch" not in found


def test_a_record_of_an_earlier_version_has_only_its_own_numbers():
    assert epoch_metrics({"epoch": 0, "train": {"loss": 0.5}}) == {"train_loss": 0.5}


def test_mlflow_accepts_each_name_and_loses_no_number():
    validation = pytest.importorskip("mlflow.utils.validation", reason="mlflow is not installed")
    names = ["hit@10", "hit#10", "hit_10", "f1(macro)", "a/../b", "a//b", "/", "größe", "x" * 400, "x" * 401, "top/5"]
    numbers = {name: float(index) for index, name in enumerate(names)}
    found = epoch_metrics({"epoch": 0, "train": {"loss": 0.5, "all_metrics": [numbers]}})
    for name in found:
        validation._validate_metric_name(name)
        assert len(name) <= 250
    assert sorted(found.values()) == sorted([0.5, *numbers.values()])
    assert (found["train_hit_10"], found["train_hit_10_2"], found["train_top/5"]) == (0.0, 1.0, 10.0)
