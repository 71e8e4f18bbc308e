from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hvd_cluster.launch import progress


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    progress.attach(events.append)
    yield events
    progress.attach(None)


def test_outside_a_worker_a_report_goes_nowhere() -> None:
    progress.report(epoch=1, thing=object())


def test_a_report_is_json(sent: list[dict[str, Any]]) -> None:
    progress.report(epoch=1, loss=0.5)
    assert sent == [{"epoch": 1, "loss": 0.5}]


def test_what_json_cannot_hold_is_refused(sent: list[dict[str, Any]]) -> None:
    with pytest.raises(TypeError, match="plain data"):
        progress.report(loss=object())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_speak_on_the_workers_channel(sent: list[dict[str, Any]]) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        progress.report(epoch=1)
        os.write(writer, str(len(sent)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"0"
    os.close(reader)
    os.close(writer)
