"""The GPUs of a task, as a program asks for them; with Spark's own scheduling in test_run.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvd_cluster.spark.devices import get_available_devices, task_environment, task_gpus


def test_there_are_none_outside_a_task() -> None:
    assert get_available_devices() == []


def test_a_worker_is_told_by_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    told = task_environment(("3", "GPU-abc"))
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert get_available_devices() == ["3", "GPU-abc"]
    assert "HOROVOD_SPARK_GPUS" not in task_environment(())


def test_addresses_are_texts_and_other_resources_are_none() -> None:
    gpus = {"gpu": SimpleNamespace(addresses=[0, 1]), "fpga": SimpleNamespace(addresses=["f"])}
    assert task_gpus(SimpleNamespace(resources=lambda: gpus)) == ["0", "1"]
    assert task_gpus(SimpleNamespace(resources=lambda: {"fpga": gpus["fpga"]})) == []
