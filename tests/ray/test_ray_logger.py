from __future__ import annotations

import queue

import pytest

from hvd_cluster.ray import ray_logger


def test_a_log_outside_a_worker_warns_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_logger, "_has_warned", False)
    ray_logger.log({"loss": 1})
    ray_logger.log({"loss": 2})
    assert caplog.text.count("not a worker of a RayExecutor") == 1


def test_only_a_dict_can_be_logged() -> None:
    with pytest.raises(TypeError, match="takes a dict"):
        ray_logger.log([1])  # type: ignore[arg-type]


def test_a_queue_gets_what_is_logged() -> None:
    box: queue.Queue[object] = queue.Queue()
    ray_logger.configure(box)
    try:
        ray_logger.log({"loss": 1})
    finally:
        ray_logger.configure(None)
    assert box.get_nowait() == {"loss": 1}
