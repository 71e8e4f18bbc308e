"""What runs the workers of a fit."""

from __future__ import annotations

import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.estimators.values import whole
from hvd_cluster.launch.pickling import dumps, modules_in

if TYPE_CHECKING:
    from hvd_cluster.spark.session import Session

OnEvent = Callable[[int, dict[str, Any]], None]

#: Packages that every worker has, since this one needs them there.
_PRESENT = frozenset({"__main__", "hvd_cluster", "horovod", "torch", "numpy", "cloudpickle", "pyarrow", "pyspark"})
#: By session: modules that a worker there has imported.
_found_modules: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class Backend(ABC):
    """Runs a function in several workers. Programs bring their own by subclassing this, or one of those below."""

    @abstractmethod
    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, env: Any = None
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` in every worker.

        A backend may also take a keyword ``on_event``: a function ``(rank, fields)`` for what workers report on the
        way.

        Args:
            env: variables for the workers on top of their own environment; None as a value removes one.

        Returns:
            the results in the order of the ranks.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """The number of workers."""

    def where(self) -> str:
        """Where the workers run, and how much room there is, for the line that a fit begins with."""
        return type(self).__name__

    def check(self) -> None:  # noqa: B027 - a backend need not know anything beforehand
        """Raise where the workers can be seen to have no place; called before the data is written."""

    def check_unpickles(self, name: str, values: Mapping[str, Any]) -> None:  # noqa: B027 - nor whether it is
        """Raise where a worker cannot unpickle ``values``; called before the data is written.

        Args:
            name: what the error calls them.
            values: what the workers will get, by name.
        """

    def check_again(self) -> None:
        """The same before the workers of a fit start again. There must be as many of them as before."""
        self.check()


class LauncherBackend(Backend):
    """A backend whose workers a ``run`` of this package starts."""

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str | None] | None = None, **kwargs: Any) -> None:
        self._num_proc = _checked(num_proc)
        self._env = dict(env or {})
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Any = None,
        on_event: OnEvent | None = None,
        **more: Any,
    ) -> list[Any]:
        more = {"on_event": on_event, **self._kwargs, **more}
        environment = {**self._env, **(env or {})}
        results: list[Any] = self._launch()(
            fn, tuple(args), dict(kwargs or {}), num_proc=self.num_processes(), env=environment, **more
        )
        return results

    @abstractmethod
    def _launch(self) -> Callable[..., list[Any]]:
        """The function that starts the workers."""

    def _unpickle_there(self, name: str, values: Mapping[str, Any], num_proc: int = 1) -> None:
        """Unpickle ``values`` in ``num_proc`` workers, which do nothing else.

        Raises:
            LaunchError: they cannot; the text names the module and the remedy.
        """

        def unpickle(**values: Any) -> None: ...

        unpickle.__qualname__ = name
        quiet = {"verbose": 0, "stdout": None, "stderr": None, "on_event": None}
        try:
            self._launch()(unpickle, (), dict(values), num_proc=num_proc, env=self._env, **{**self._kwargs, **quiet})
        except WorkerFailedError as error:
            if isinstance(error.__cause__, LaunchError):
                raise LaunchError(f"{error.__cause__}. No data has been written") from error
            raise


class LocalBackend(LauncherBackend):
    """Workers are processes of this machine.

    Args:
        num_proc: how many; 1 if not given.
        env: variables for the workers, on top of the environment of this process.
        kwargs: further arguments of :func:`hvd_cluster.launch.local.run`. With ``verbose=0`` the workers' output is
            dropped, unless ``stdout`` or ``stderr`` is given.
    """

    def _launch(self) -> Callable[..., list[Any]]:
        from hvd_cluster.launch.local import run

        return run

    def where(self) -> str:
        return "processes of this machine"

    def num_processes(self) -> int:
        return self._num_proc or 1


class SparkBackend(LauncherBackend):
    """Workers are child processes of the tasks of a Spark barrier stage, on a classic or a Connect session.

    Args:
        num_proc: how many; as many as the session runs tasks at once if not given.
        env: variables for the workers. Beside these they have the environment of their executor, not the driver's.
        kwargs: further arguments of :func:`hvd_cluster.spark.run`, such as ``spark`` (the session), ``stdout``,
            ``stderr``, ``verbose``, ``start_timeout``, ``workers_per_task``, ``resource_profile`` or
            ``prefix_output_with_timestamp``.
    """

    #: ``run`` takes rows of a DataFrame, which go through the barrier stage.
    brings_rows = True

    def _launch(self) -> Callable[..., list[Any]]:
        from hvd_cluster.spark import run

        return run

    def num_processes(self) -> int:
        """The number of workers; asks the session once where it was not given, which may start a small Spark job."""
        if self._num_proc is None:
            from hvd_cluster.spark.preflight import infer_num_tasks

            self._num_proc = infer_num_tasks(self._session(), self._per_task) * self._per_task
        return self._num_proc

    def where(self) -> str:
        slots = self._session().slots(self._kwargs.get("resource_profile"))
        return "on Spark: " + slots.describe(self.num_processes() // self._per_task)

    @property
    def _per_task(self) -> int:
        return int(self._kwargs.get("workers_per_task") or 1)

    def _session(self) -> Session:
        from hvd_cluster.spark.active_session import active

        return active(self._kwargs.get("spark"))

    @property
    def is_far(self) -> bool:
        """Whether tasks may run on other machines than this process."""
        from hvd_cluster.spark import host

        return self._session().driver_hosts()[0] != host.LOOPBACK

    @property
    def driver_is_out_of_reach(self) -> bool:
        """Whether workers cannot open a connection to this process, as far as can be told: a remote Connect server."""
        from hvd_cluster.spark.connect import ConnectSession

        return isinstance(self._session(), ConnectSession) and self.is_far

    def check(self) -> None:
        """Wait until the session has a slot for each worker, as :func:`hvd_cluster.spark.run` does.

        Raises:
            NotEnoughSlotsError: it can never have that many.
            StartTimeoutError: executors that might have joined did not.
        """
        from hvd_cluster.settings import Settings
        from hvd_cluster.spark.preflight import wait_for_slots

        timeout_s = Settings.from_env(spark_start_timeout_s=self._kwargs.get("start_timeout")).spark_start_timeout_s
        num_tasks = self.num_processes() // self._per_task
        wait_for_slots(self._session(), num_tasks, timeout_s, self._kwargs.get("resource_profile"))

    def check_unpickles(self, name: str, values: Mapping[str, Any]) -> None:
        """Unpickle ``values`` in the workers of one task, unless a task of this session has had their modules.

        Raises:
            LaunchError: they cannot be unpickled; or the executor has another Python or another version of this
                package.
        """
        wanted = _modules_to_find(values)
        known = _found_modules.setdefault(self._session().spark, set())
        if not wanted <= known:
            self._unpickle_there(name, values, self._per_task)
            known |= wanted


def _modules_to_find(values: Mapping[str, Any]) -> set[str]:
    """The modules of ``values`` that a worker which has this package need not have."""
    present = {*sys.stdlib_module_names, *_PRESENT}
    return {name for name in modules_in(dumps(dict(values))[0]) if name.partition(".")[0] not in present}


def takes_rows(backend: Any) -> bool:
    """Whether ``backend.run`` brings rows to the workers itself, so that no store is needed."""
    return getattr(backend, "brings_rows", False) and _accepts(backend, "rows")


def is_far(backend: Any) -> bool:
    """Whether its workers may be on machines that see nothing of this one's disk, as far as the backend tells."""
    return bool(getattr(backend, "is_far", False))


def check(backend: Any) -> None:
    """``backend.check``, where it has that: any object with ``run`` and ``num_processes`` will do."""
    if hasattr(backend, "check"):
        backend.check()


def check_unpickles(backend: Any, name: str, values: Mapping[str, Any]) -> None:
    """``backend.check_unpickles``, where it has that."""
    if hasattr(backend, "check_unpickles"):
        backend.check_unpickles(name, values)


def check_again(backend: Any) -> None:
    """``backend.check_again``, where it has that, or else ``check``."""
    if hasattr(backend, "check_again"):
        backend.check_again()
    else:
        check(backend)


def run_on(backend: Any, fn: Callable[..., Any], args: Sequence[Any], on_event: OnEvent, rows: Any = None) -> list[Any]:
    """``backend.run``, with ``on_event`` where it takes that: any object with ``run`` and ``num_processes`` will do.

    Args:
        rows: data for the workers that comes with them, for backends whose ``run`` takes ``rows``.
    """
    more = {"on_event": on_event} if _accepts(backend, "on_event") else {}
    results: list[Any] = backend.run(fn, args=tuple(args), **more, **({"rows": rows} if rows is not None else {}))
    return results


def _accepts(backend: Any, name: str) -> bool:
    parameters = inspect.signature(backend.run).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _checked(num_proc: int | None) -> int | None:
    try:
        return None if num_proc is None else int(whole(1)(num_proc))
    except ValueError as error:
        raise ValueError(f"num_proc={num_proc!r} {error}") from None
