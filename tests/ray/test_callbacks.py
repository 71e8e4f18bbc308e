from __future__ import annotations

import threading
from typing import Any

import pytest

from hvd_cluster.ray.callbacks import CallbackLoop


def test_callbacks_are_called_in_the_thread_that_waits() -> None:
    seen: list[tuple[Any, str]] = []
    loop = CallbackLoop([lambda info: seen.append((info["step"], threading.current_thread().name))])

    def job() -> str:
        for step in range(3):
            loop.put({"step": step})
        return "done"

    assert loop.until(job, stop=lambda: None) == "done"
    here = threading.current_thread().name
    assert seen == [(0, here), (1, here), (2, here)]


def test_what_the_job_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        CallbackLoop([print]).until(lambda: 1 // 0, stop=lambda: None)


def test_a_callback_that_raises_stops_the_job() -> None:
    stopped = threading.Event()

    def callback(info: dict[str, Any]) -> None:
        raise KeyError("enough")

    loop = CallbackLoop([callback])

    def job() -> bool:
        loop.put({})
        return stopped.wait(10)

    with pytest.raises(KeyError, match="enough"):
        loop.until(job, stop=stopped.set)
    assert stopped.is_set()


@pytest.mark.parametrize("given", [print, [3], "print"])
def test_what_is_not_a_list_of_functions_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="callbacks must be a list of functions that take a dict, such as"):
        CallbackLoop(given)
