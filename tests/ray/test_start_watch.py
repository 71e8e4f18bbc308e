from __future__ import annotations

import threading

import pytest

from hvd_cluster.ray.start_watch import StartWatch, late_text


@pytest.mark.long
def test_workers_that_do_not_report_though_there_is_room_are_told_about() -> None:
    stopped = threading.Event()
    watch = StartWatch(lambda: 1, lambda: {"a": 2, "b": 1}, needed=3, timeout_s=0.1, stop=stopped.set)
    assert stopped.wait(20)
    watch.close()
    assert "2 of the 3 workers that the job begins with did not start within 0.1 s" in str(watch.error)
    assert isinstance(watch.error, TimeoutError)


@pytest.mark.long
def test_no_one_is_late_while_there_is_no_room_or_once_all_have_reported() -> None:
    stopped = threading.Event()
    full = StartWatch(lambda: 0, lambda: {"a": 2}, needed=3, timeout_s=0.1, stop=stopped.set)
    reported = StartWatch(lambda: 3, lambda: {"a": 3}, needed=3, timeout_s=0.1, stop=stopped.set)
    assert not stopped.wait(1.5)
    for watch in (full, reported):
        watch.close()
        assert watch.error is None


def test_a_wait_for_an_installation_is_reported_with_what_to_raise() -> None:
    text = late_text(30.0, ["pip", "working_dir"])
    assert "runtime_env (pip, working_dir)" in text
    assert "create_settings(timeout_s=...), now 30." in text
    assert "a runtime_env" in late_text(30.0, [])
