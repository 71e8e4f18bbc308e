"""What the driver does with the messages of a job's tasks."""

from __future__ import annotations

from typing import Any

import pytest

import hvd_cluster.spark


@pytest.mark.spark("local")
@pytest.mark.usefixtures("spark")
def test_a_callback_that_raises_is_logged_and_does_not_fail_the_job(caplog: pytest.LogCaptureFixture) -> None:
    def reports() -> int:
        from hvd_cluster.launch.progress import report

        report(epoch=1)
        return 7

    def on_event(rank: int, fields: dict[str, Any]) -> None:
        raise KeyError("a bug of the callback")

    assert hvd_cluster.spark.run(reports, num_proc=1, on_event=on_event) == [7]
    assert "a bug of the callback" in caplog.text
