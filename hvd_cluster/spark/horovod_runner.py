"""``HorovodRunner``, as used by programs for Databricks."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hvd_cluster.launch.call import captured, pack
from hvd_cluster.launch.checks import whole_problems
from hvd_cluster.launch.local import run as run_here
from hvd_cluster.spark.driver_log import show
from hvd_cluster.spark.function import run as run_on_spark

_VERBOSITIES = ("all", "log_callback_only")


class HorovodRunner:
    """Runs a training function on Spark, or for debugging on the driver's machine.

    Args:
        np: number of workers, each in a Spark task, once there are that many slots. A negative number runs ``-np``
            processes on this machine and shows their output. 0, which is deprecated, uses all slots of the cluster.
        driver_log_verbosity: "all" shows every worker's output here; "log_callback_only" shows only what they send with
            :func:`~hvd_cluster.spark.driver_log.log_to_driver` or a ``LogCallback``.

    Raises:
        ValueError: ``np`` is not a whole number, or the verbosity is neither of these.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        wrong = whole_problems("np", np)
        if driver_log_verbosity not in _VERBOSITIES:
            wrong.append(f"driver_log_verbosity={driver_log_verbosity!r} must be one of {', '.join(_VERBOSITIES)}")
        if wrong:
            raise ValueError("; ".join(wrong))
        if np == 0:
            warnings.warn(
                "HorovodRunner(np=0) is deprecated: pass the number of workers", DeprecationWarning, stacklevel=2
            )
        #: The ``np`` of the constructor.
        self.num_processor = np
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on every worker.

        It first prints how much data is sent to the workers.

        Returns:
            The return value of rank 0.

        Raises:
            WorkerFailedError: a worker raised an exception, exited or was killed; the user's traceback comes first.
            NotEnoughSlotsError: the cluster can never have that many slots.
            LaunchError: there is no session, or something cannot be pickled.
        """
        self._say(f"HorovodRunner: {_described(main, kwargs)}")
        if self.num_processor < 0:
            return run_here(main, (), kwargs, num_proc=-self.num_processor, on_event=show)[0]
        verbose = int(self.driver_log_verbosity == "all")
        if not verbose:
            self._say(
                'Of the workers\' output only log_to_driver() is shown; driver_log_verbosity="all" shows all of it.'
            )
        num_proc = self.num_processor or None
        return run_on_spark(main, (), kwargs, num_proc=num_proc, verbose=verbose, on_event=show)[0]

    @staticmethod
    def _say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _described(main: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """What a call sends to the workers, in words."""
    name = getattr(main, "__qualname__", type(main).__qualname__)
    names = ", ".join(_captured(main)) or "nothing"
    size = len(pack(main, (), kwargs))
    return f"{name} and its arguments are {size:,} bytes when pickled; it captures {names}."


def _captured(main: Callable[..., Any]) -> list[str]:
    """The names of the variables that a function captures."""
    if not inspect.isfunction(main):
        return []
    enclosing, module = captured(main)
    return sorted({*enclosing, *module})
