"""Marks the tests that need no second process ``fast``, and fails one of them that starts a process.

The rule is read from the code: a test is fast unless it is marked ``slow``, ``long``, ``spark`` or ``processes``, or
names a thing that starts processes, itself or through the fixtures and functions of ``tests/`` that it uses.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

HERE = str(Path(__file__).parents[1])
#: What tests call to start processes, under the names by which code refers to it.
STARTERS = {
    *("subprocess", "multiprocessing", "Popen", "fork", "posix_spawn", "system", "WorkerProcess", "ChildProcess"),
    *("Executor", "LocalBackend", "fit", "run", "run_elastic", "ray", "RayExecutor", "ElasticRayExecutor"),
    *("Cluster", "SparkSession", "SparkContext"),
}
EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec"}

#: Whether a fast test runs now, and what it has started.
_is_watching = False
_started: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_note)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marked = any(item.get_closest_marker(name) for name in ("slow", "long", "spark", "processes"))
        if isinstance(item, pytest.Function) and not marked and not any(map(_starts, _functions(item))):
            item.add_marker("fast")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _is_watching
    _started.clear()
    _is_watching = item.get_closest_marker("fast") is not None
    try:
        return (yield)
    finally:
        _is_watching = False


@pytest.fixture(autouse=True)
def _is_fast() -> Iterator[None]:
    yield
    if _started:
        pytest.fail(f"this test starts processes: mark it @pytest.mark.processes\n  {_started}", pytrace=False)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    # The first import of TensorFlow asks platform.processor(), which runs uname.
    if _is_watching and event in EVENTS and arguments[:1] != ("uname",):
        _started.append(f"{event}{arguments[:2]}")


def _functions(item: pytest.Function) -> Iterator[Any]:
    yield item.function
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        yield from (definition.func for definition in definitions)


@functools.cache
def _starts(value: Any) -> bool:
    return not STARTERS.isdisjoint(_names(value, set()))


def _names(value: Any, seen: set[int]) -> Iterator[str]:
    """The names in the code of a function or class of ``tests/``, and of those that it names in turn."""
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, functools.partial):
        value = value.func
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type):
        if getattr(sys.modules.get(value.__module__), "__file__", "") and inspect.getfile(value).startswith(HERE):
            for part in vars(value).values():
                yield from _names(getattr(part, "__func__", part), seen)
    elif isinstance(value, FunctionType) and value.__code__.co_filename.startswith(HERE):
        for name in _code_names(value.__code__):
            yield name
            yield from _names(value.__globals__.get(name), seen)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)
