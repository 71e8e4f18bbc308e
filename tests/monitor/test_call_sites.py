"""Where the training thread is, as its user would say it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_cluster
from hvd_cluster.data.reading.read_ahead import ReadAhead
from hvd_cluster.monitor.call_sites import CallSite, CallSites
from hvd_cluster.monitor.step_clock import COMPUTE, DATA, SAVE, StepClock


@contextlib.contextmanager
def block() -> Iterator[None]:
    yield


def sample(sites: CallSites, thread: threading.Thread, is_over: threading.Event) -> None:
    """Look 40 times at what a thread does, and end it."""
    thread.start()
    try:
        for _ in range(40):
            time.sleep(0.01)
            sites.sample()
    finally:
        is_over.set()
        thread.join()


def seen(work: Callable[[], object], activity: int = COMPUTE) -> CallSite:
    """What a sampler sees most often while a thread does ``work`` again and again."""
    clock = StepClock()
    sites = CallSites(clock)
    is_over = threading.Event()

    def train() -> None:
        clock.restart()
        with clock.span(activity):
            while not is_over.is_set():
                work()

    thread = threading.Thread(target=train)
    sample(sites, thread, is_over)
    found = sites.take(100)
    assert sum(count for _, count in found) <= 40
    assert sites.take(100) == ()
    return found[0][0]


def test_a_library_is_named_with_the_line_that_calls_it(tmp_path: Path) -> None:
    tensor = torch.zeros(1_000_000)
    found = seen(lambda: torch.save(tensor, tmp_path / "x.pt"))
    assert found.text.startswith("save (tests/monitor/test_call_sites.py:")
    assert found.activity == SAVE  # the calls inside say so


def test_a_decorator_of_a_context_is_not_what_the_thread_does(tmp_path: Path) -> None:
    tensor = torch.zeros(1_000_000)
    save = block()(torch.save)
    assert seen(lambda: save(tensor, tmp_path / "x.pt")).text.startswith("save (tests/monitor/test_call_sites.py:")


def test_code_of_the_user_is_named_by_its_function() -> None:
    def sleep_in_a_function() -> None:
        time.sleep(0.05)

    found = seen(sleep_in_a_function)
    assert "sleep_in_a_function (tests/monitor/test_call_sites.py:" in found.text
    assert found.activity == COMPUTE


def test_without_code_of_the_user_the_training_loop_is_named() -> None:
    clock = StepClock()
    sites = CallSites(clock)
    is_over = threading.Event()
    path = f"{Path(hvd_cluster.__file__).parent}/estimators/torch/loop.py"
    loop = "def train(model, rows):\n    begin()\n    while not is_over():\n        model(rows)\n"
    namespace: dict[str, Any] = {"begin": clock.restart, "is_over": is_over.is_set}
    exec(compile(loop, path, "exec"), namespace)
    thread = threading.Thread(target=namespace["train"], args=(torch.nn.Linear(2000, 2000), torch.zeros(64, 2000)))
    sample(sites, thread, is_over)
    found, _ = sites.take(1)[0]
    assert found.text == "Module._wrapped_call_impl (hvd_cluster/estimators/torch/loop.py:4)"


def test_how_a_worker_starts_is_not_code_of_the_user() -> None:
    clock = StepClock()
    sites = CallSites(clock)
    is_over = threading.Event()
    package = Path(hvd_cluster.__file__).parent
    namespace: dict[str, Any] = {"begin": clock.restart, "is_over": is_over.is_set, "sleep": time.sleep}
    for path, code in [
        (
            f"{package}/estimators/torch/loop.py",
            "def train():\n    begin()\n    while not is_over():\n        sleep(0.01)\n",
        ),
        (f"{package}/launch/worker.py", "def perform():\n    train()\n"),
        ("<string>", "def start():\n    perform()\n"),
    ]:
        exec(compile(code, path, "exec"), namespace)
    sample(sites, threading.Thread(target=namespace["start"]), is_over)
    found, _ = sites.take(1)[0]
    assert found.text == "train (hvd_cluster/estimators/torch/loop.py:4)"


def test_the_clock_knows_better_what_an_activity_is(tmp_path: Path) -> None:
    tensor = torch.zeros(1_000_000)
    assert seen(lambda: torch.save(tensor, tmp_path / "x.pt"), DATA).activity == DATA


def test_nothing_is_seen_without_the_thread_that_trains() -> None:
    clock = StepClock()
    thread = threading.Thread(target=clock.restart)
    thread.start()
    thread.join()
    sites = CallSites(clock)
    sites.sample()
    assert sites.take(10) == ()


@pytest.mark.parametrize("waits", [True, False])
def test_a_function_of_the_user_for_which_the_reader_waits_is_named(waits: bool) -> None:
    clock = StepClock()
    sites = CallSites(clock)
    is_over = threading.Event()

    def prepare(*_: object) -> None:
        while not is_over.is_set():
            time.sleep(0.01)

    ahead = ReadAhead(prepare, [1], num_threads=1, limit_bytes=1)

    def train() -> None:
        clock.restart()
        with clock.span(DATA):
            ahead.take() if waits else is_over.wait()

    sample(sites, threading.Thread(target=train), is_over)
    ahead.close()
    found, _ = sites.take(1)[0]
    assert found.activity == DATA
    assert ("prepare (tests/monitor/test_call_sites.py:" in found.text) == waits


def test_looking_keeps_nothing_of_what_the_threads_hold() -> None:
    clock = StepClock()
    sites = CallSites(clock)
    is_over = threading.Event()
    held: list[weakref.ref[torch.Tensor]] = []
    ahead = ReadAhead(lambda *_: is_over.wait(), [1], num_threads=1, limit_bytes=1)

    def train() -> None:
        batch = torch.zeros(1)
        held.append(weakref.ref(batch))
        clock.restart()
        with clock.span(DATA):
            ahead.take()

    gc.disable()
    try:
        sample(sites, threading.Thread(target=train), is_over)
        assert held[0]() is None
    finally:
        gc.enable()
        ahead.close()
