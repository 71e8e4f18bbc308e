"""``horovod.runner.util.threads``: functions in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``target(*args)``.

    Args:
        target: the function.
        args: its arguments.
        name: the thread's name.
        daemon: whether the process may exit while the thread runs.
        silent: whether to ignore exceptions of ``target``.
    """
    if not isinstance(args, (tuple, list)):
        raise ValueError(f"args must be a tuple or a list, not {type(args).__name__}: write ({args!r},)")

    def call() -> None:
        try:
            target(*args)
        except Exception:  # of any class; `silent` asks to ignore it
            if not silent:
                raise

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``func(*args)`` once ``event`` is set.

    Unless ``stop`` is set first.

    Args:
        event: what to wait for.
        func: the function.
        args: its arguments.
        stop: ends the wait.
        check_stop_interval_s: seconds between two checks of ``stop``.
        daemon: whether the process may exit while the thread runs.
        silent: whether to ignore exceptions of ``func``.
    """

    def wait_and_call() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(wait_and_call, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call ``fn(*args)`` for each of ``args_list``, in threads.

    Args:
        fn: the function.
        args_list: the arguments of each call.
        block_until_all_done: whether to wait for the results.
        max_concurrent_executions: the maximum number of threads.

    Returns:
        Index of the call -> its return value; None without waiting.

    Raises:
        Exception: the exception of the first call that raised one, in the order of ``args_list``.
    """
    if not args_list:
        return {} if block_until_all_done else None
    executor = ThreadPoolExecutor(min(max_concurrent_executions, len(args_list)))
    futures = [executor.submit(fn, *args) for args in args_list]
    executor.shutdown(wait=block_until_all_done)
    return {index: future.result() for index, future in enumerate(futures)} if block_until_all_done else None
