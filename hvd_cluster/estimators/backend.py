"""Backends run the workers of a fit: local processes, Spark tasks, Ray actors."""

from __future__ import annotations

import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, TextIO

from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.estimators.logged_model.requirements import imports_of
from hvd_cluster.estimators.values import whole
from hvd_cluster.launch.pickling import dumps, modules_in
from hvd_cluster.launch.run_options import checked_arguments

if TYPE_CHECKING:
    from hvd_cluster.spark.session import Session

OnEvent = Callable[[int, dict[str, Any]], None]

#: Packages that every worker has, because this package needs them.
_PRESENT = frozenset({"__main__", "hvd_cluster", "horovod", "torch", "numpy", "cloudpickle", "pyarrow", "pyspark"})
#: By session, the modules that one of its workers has imported.
_found_modules: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class Backend(ABC):
    """Base of the backends, which run a function in several workers.

    Subclass it, or one of the classes below, for another way to run them.
    """

    @abstractmethod
    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, env: Any = None
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` in every worker.

        A backend may also take a keyword ``on_event``: a function ``(rank, fields)`` that gets the reports of workers
        while they run.

        Args:
            env: variables added to the workers' own environment; the value None removes one.

        Returns:
            The results in the order of the ranks.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """The number of workers."""

    def where(self) -> str:
        """Where the workers run and with how much room, for the first log line of a fit."""
        return type(self).__name__

    #: Whether ``run`` takes rows of a DataFrame, so that no store is needed.
    brings_rows = False

    @property
    def is_far(self) -> bool:
        """Whether workers may run on machines that do not see the disk of this one."""
        return False

    @property
    def driver_is_out_of_reach(self) -> bool:
        """Whether workers cannot open a connection to this process."""
        return False

    def check(self) -> None:  # noqa: B027 - optional
        """Raise if there is no room for the workers; called before the data is written."""

    def check_unpickles(self, name: str, values: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Raise if a worker cannot unpickle ``values``.

        It is called before the data is written.

        Args:
            name: the name of their function in the error.
            values: the arguments that the workers will get, by name.
        """

    def check_again(self) -> None:
        """Repeat :meth:`check` before workers restart; their number must not change."""
        self.check()


class LauncherBackend(Backend):
    """A backend whose workers are started by one of this package's ``run`` functions.

    The constructor of a subclass has the arguments of that function, but for the call and its rows, and passes them as
    ``locals()`` returns them.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        given = {name: value for name, value in arguments.items() if value is not None}
        self._num_proc = _checked(given.pop("num_proc", None))
        self._env = dict(given.pop("env", {}))
        #: The other arguments that are not None.
        self._kwargs = {name: value for name, value in given.items() if name not in ("self", "__class__")}

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
        """Unpickle ``values`` in ``num_proc`` workers that do nothing else.

        Raises:
            LaunchError: it fails; the text names the module and the remedy.
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
        num_proc: the number of workers; 1 by default.
        env: variables for the workers, added to the environment of this process.

    The other arguments are those of :func:`hvd_cluster.launch.local.run`. ``verbose=0`` drops the workers' output,
    unless ``stdout`` or ``stderr`` is given.
    """

    @checked_arguments
    def __init__(
        self,
        num_proc: int = 1,
        env: Mapping[str, str | None] | None = None,
        *,
        executable: str | None = None,
        start_timeout: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        prefix_output_with_timestamp: bool = False,
        on_event: OnEvent | None = None,
        verbose: int = 1,
        torch_backend: str | None = None,
    ) -> None:
        super().__init__(locals())

    def _launch(self) -> Callable[..., list[Any]]:
        from hvd_cluster.launch.local import run

        return run

    def where(self) -> str:
        return "processes of this machine"

    def num_processes(self) -> int:
        return self._num_proc or 1


class SparkBackend(LauncherBackend):
    """Workers that are child processes of the tasks of a Spark barrier stage.

    The session is a classic or a Connect session.

    Args:
        num_proc: the number of workers; by default as many as the session runs tasks at once.
        env: variables for the workers, added to the environment of their executor, not of the driver.

    The other arguments are those of :func:`hvd_cluster.spark.run`.
    """

    #: Rows of a DataFrame go through the barrier stage.
    brings_rows = True

    @checked_arguments
    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        *,
        start_timeout: float | None = None,
        use_mpi: bool | None = None,
        use_gloo: bool | None = None,
        extra_mpi_args: str | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        verbose: int = 1,
        nics: str | Sequence[str] | set[str] | None = None,
        prefix_output_with_timestamp: bool = False,
        executable: str | None = None,
        spark: Any = None,
        workers_per_task: int = 1,
        resource_profile: Any = None,
        on_event: OnEvent | None = None,
        torch_backend: str | None = None,
    ) -> None:
        super().__init__(locals())

    def _launch(self) -> Callable[..., list[Any]]:
        from hvd_cluster.spark import run

        return run

    def num_processes(self) -> int:
        """The number of workers.

        If it was not given, the session is asked once, which may run a small Spark job.
        """
        if self._num_proc is None:
            from hvd_cluster.spark.preflight import infer_num_tasks

            self._num_proc = infer_num_tasks(self._session(), self._per_task) * self._per_task
        return self._num_proc

    def where(self) -> str:
        slots = self._session().slots(self._kwargs.get("resource_profile"))
        return "on Spark: " + slots.describe(self.num_processes() // self._per_task)

    @property
    def _per_task(self) -> int:
        return int(self._kwargs["workers_per_task"])

    def _session(self) -> Session:
        from hvd_cluster.spark.active_session import active

        return active(self._kwargs.get("spark"))

    @property
    def is_far(self) -> bool:
        """Whether tasks may run on other machines than this process does."""
        from hvd_cluster.rendezvous.sockets import LOOPBACK

        return self._session().driver_hosts()[0] != LOOPBACK

    @property
    def driver_is_out_of_reach(self) -> bool:
        """Whether workers cannot connect to this process: the Connect server is remote."""
        from hvd_cluster.spark.connect import ConnectSession

        return isinstance(self._session(), ConnectSession) and self.is_far

    def check(self) -> None:
        """Wait for a slot for each worker, as :func:`hvd_cluster.spark.run` does.

        Raises:
            NotEnoughSlotsError: the session can never have that many.
            StartTimeoutError: executors that could have joined did not.
        """
        from hvd_cluster.settings import Settings
        from hvd_cluster.spark.preflight import wait_for_slots

        timeout_s = Settings.from_env(spark_start_timeout_s=self._kwargs.get("start_timeout")).spark_start_timeout_s
        num_tasks = self.num_processes() // self._per_task
        wait_for_slots(self._session(), num_tasks, timeout_s, self._kwargs.get("resource_profile"))

    def check_unpickles(self, name: str, values: Mapping[str, Any]) -> None:
        """Unpickle ``values`` in the workers of one task.

        This is skipped if a task of this session has imported their modules. These include the modules that functions
        among them import when they are called, as they were in this process. Methods of models may never be called.

        Raises:
            LaunchError: unpickling fails, or the executor has another version of Python or of this package.
        """
        functions = [value for value in values.values() if isinstance(value, FunctionType)]
        imports = _without_present(imports_of(functions) & sys.modules.keys())
        wanted = _without_present(modules_in(dumps(dict(values))[0])) | imports
        known = _found_modules.setdefault(self._session().spark, set())
        if not wanted <= known:
            # Unpickling a module imports it.
            modules = {"imports": [sys.modules[module] for module in sorted(imports)]}
            self._unpickle_there(name, {**values, **modules}, self._per_task)
            known |= wanted


def _without_present(modules: Iterable[str]) -> set[str]:
    """The modules that a worker may lack although it has this package."""
    present = {*sys.stdlib_module_names, *_PRESENT}
    return {name for name in modules if name.partition(".")[0] not in present}


def takes_rows(backend: Backend) -> bool:
    """Whether ``backend.run`` brings rows to the workers, so that no store is needed."""
    return backend.brings_rows and _accepts(backend, "rows")


def as_backend(given: Any) -> Backend:
    """``given``, or a Backend around an object with ``run`` and ``num_processes``."""
    if isinstance(given, Backend):
        return given
    names = [name for name in vars(Backend) if not name.startswith("_") and hasattr(given, name)]
    members = {name: property(lambda _, name=name: getattr(given, name)) for name in names}  # type: ignore[misc]
    backend: Backend = type(type(given).__name__, (Backend,), members)()
    return backend


def run_on(
    backend: Backend, fn: Callable[..., Any], args: Sequence[Any], on_event: OnEvent, rows: Any = None
) -> list[Any]:
    """``backend.run``, with ``on_event`` if it takes that.

    Args:
        rows: rows for the workers, for backends whose ``run`` takes ``rows``.
    """
    more: dict[str, Any] = {"on_event": on_event} if _accepts(backend, "on_event") else {}
    return backend.run(fn, args=tuple(args), **more, **({"rows": rows} if rows is not None else {}))


def _accepts(backend: Backend, name: str) -> bool:
    parameters = inspect.signature(backend.run).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _checked(num_proc: int | None) -> int | None:
    try:
        return None if num_proc is None else int(whole(1)(num_proc))
    except ValueError as error:
        raise ValueError(f"num_proc={num_proc!r} {error}") from None
