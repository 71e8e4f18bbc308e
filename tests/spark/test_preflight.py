"""Waiting for slots before a job starts. The session is a stand-in for a cluster whose executors come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hvd_cluster.errors import NotEnoughSlotsError, StartTimeoutError
from hvd_cluster.spark import preflight
from hvd_cluster.spark.session import Session
from hvd_cluster.spark.slots import SlotCounts


class Growing(Session):
    """A cluster with one more state at each look."""

    def __init__(
        self, *states: SlotCounts, parallelism: int = 4, settings: Mapping[str, str | None] | None = None
    ) -> None:
        super().__init__(spark=None)
        self._states = list(states)
        self._parallelism = parallelism
        self._settings = settings or {}

    def conf(self, name: str) -> str | None:
        return self._settings.get(name)

    def slots(self, profile: Any = None) -> SlotCounts:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def default_parallelism(self) -> int:
        return self._parallelism

    def ship(self, call: bytes) -> tuple[Any, Callable[[], None]]:
        raise NotImplementedError

    def thread(self, target: Callable[[], None], tag: str) -> threading.Thread:
        raise NotImplementedError

    def cancel(self, tag: str) -> None:
        raise NotImplementedError

    def running_tasks(self, tag: str) -> int | None:
        raise NotImplementedError

    def driver_hosts(self) -> tuple[str, list[str]]:
        raise NotImplementedError


@pytest.mark.long
def test_executors_that_come_later_are_waited_for_and_the_log_says_for_what(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_QUIET_S", 0.0)
    session = Growing(SlotCounts(total=1), SlotCounts(total=2), SlotCounts(total=4))
    with caplog.at_level(logging.INFO, "hvd_cluster"):
        preflight.wait_for_slots(session, 4, 60)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["4 slots needed, 1 free; dynamic allocation is off. Waiting up to 60 s for more executors"]


def test_executors_that_never_come_end_in_horovods_message_with_the_slots() -> None:
    with pytest.raises(StartTimeoutError, match="Timed out waiting for Spark tasks to start") as raised:
        preflight.wait_for_slots(Growing(SlotCounts(total=1)), 4, 0.1)
    assert "4 slots needed, 1 free" in str(raised.value)
    assert isinstance(raised.value, TimeoutError)


def test_what_can_never_be_is_not_waited_for() -> None:
    with pytest.raises(NotEnoughSlotsError):
        preflight.wait_for_slots(Growing(SlotCounts(total=1, max_total=2)), 4, 600)


def test_a_session_that_cannot_know_does_not_wait() -> None:
    preflight.wait_for_slots(Growing(SlotCounts()), 4, 600)


@pytest.mark.parametrize(
    ("slots", "setting", "expected"),
    [
        (SlotCounts(total=2), None, 2),
        (SlotCounts(), None, 8),
        (SlotCounts(total=0), None, 8),
        (SlotCounts(total=9), None, 8),
        (SlotCounts(total=0, max_total=12), None, 12),  # a fresh session whose executors have not come yet
        (SlotCounts(total=12, max_total=12), "8", 8),
        (SlotCounts(total=4, max_total=4), "8", 4),
    ],
)
def test_the_number_of_workers_is_inferred_and_logged(
    slots: SlotCounts, setting: str | None, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    session = Growing(slots, parallelism=8, settings={"spark.default.parallelism": setting})
    with caplog.at_level(logging.INFO, "hvd_cluster"):
        assert preflight.infer_num_tasks(session) == expected
    assert f"Running {expected} processes (inferred from spark.default.parallelism)..." in caplog.text
