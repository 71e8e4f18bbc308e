from __future__ import annotations

import threading

from hvd_cluster.ray.start_watch import StartWatch


def test_workers_that_do_not_report_though_there_is_room_are_told_about() -> None:
    stopped = threading.Event()
    watch = StartWatch(lambda: 1, lambda: {"a": 2, "b": 1}, needed=3, timeout_s=0.1, stop=stopped.set)
    assert stopped.wait(20)
    watch.close()
    assert "2 of the 3 workers that the job begins with did not start within 0.1 s" in str(watch.verdict)
    assert isinstance(watch.verdict, TimeoutError)


def test_nobody_is_late_while_there_is_no_room_or_once_all_have_reported() -> None:
    stopped = threading.Event()
    full = StartWatch(lambda: 0, lambda: {"a": 2}, needed=3, timeout_s=0.1, stop=stopped.set)
    reported = StartWatch(lambda: 3, lambda: {"a": 3}, needed=3, timeout_s=0.1, stop=stopped.set)
    assert not stopped.wait(1.5)
    for watch in (full, reported):
        watch.close()
        assert watch.verdict is None
