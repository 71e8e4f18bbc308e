"""The arguments that the launchers' ``run`` functions share.

They are checked here, with what follows from them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, ParamSpec, TextIO, TypeVar

from hvd_cluster.engine.none_arguments import filler
from hvd_cluster.launch import checks
from hvd_cluster.launch.environment import interface_variables
from hvd_cluster.launch.logs import LinePrinter, printer
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.worker_group import Callbacks, OnEvent, ignore_event
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.rendezvous.addresses import interface_names
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="RunOptions")

_FLAGS = ("prefix_output_with_timestamp", "use_gloo", "use_mpi")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunOptions:
    """The arguments of the ``run`` functions, which describe them.

    They have the same names; None means not given. A new argument of all launchers is a field here, a check in
    :meth:`problems`, and a parameter of each function.

    Raises:
        ValueError: arguments are wrong; the message lists all of them.
    """

    num_proc: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    start_timeout: float | None = None
    elastic_timeout: float | None = None
    env: Mapping[str, Any] | None = None
    executable: str | None = None
    nics: str | Iterable[str] | None = None
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    verbose: int = 1
    prefix_output_with_timestamp: bool = False
    on_event: OnEvent | None = None
    torch_backend: str | None = None
    use_gloo: bool | None = None
    use_mpi: bool | None = None
    #: What the user calls an argument, where that is not its name here: the flags of hvdrun.
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls: type[T], arguments: Mapping[str, Any], problems: Iterable[str] = ()) -> T:
        """The options among the arguments of a function, as ``locals()`` has them.

        All others are ignored.

        Args:
            arguments: by name; None means not given.
            problems: those of the function's other arguments, for the same message.
        """
        given = {name: value for name, value in fields_of(cls, arguments).items() if value is not None}
        if isinstance(given.get("nics"), Iterator):
            given["nics"] = tuple(given["nics"])  # it is read more than once
        wrong = list(problems)
        try:
            options = cls(**given)
        except ValueError as error:
            wrong.insert(0, str(error))
        if wrong:
            raise ValueError("; ".join(wrong))
        if options.use_mpi:
            logger.warning("use_mpi=True has no effect: hvd_cluster does not use MPI")
        return options

    def __post_init__(self) -> None:
        if wrong := self.problems():
            raise ValueError("; ".join(wrong))

    def problems(self) -> list[str]:
        """What is wrong with the arguments, a sentence each."""
        name = self.name_of
        count = checks.count_problems(name("num_proc"), self.num_proc)
        timeouts = {name(each): getattr(self, each) for each in ("start_timeout", "elastic_timeout")}
        return [
            *count,
            *checks.seconds_problems(timeouts),
            *checks.verbosity_problems("verbose", self.verbose),
            *(text for each in _FLAGS for text in checks.flag_problems(name(each), getattr(self, each))),
            *checks.controller_problems(self.use_gloo, self.use_mpi),
            *checks.interface_problems(self.nics, name("nics")),
            *checks.variable_problems(self.env),
            *([] if count else self.elastic_problems()),
        ]

    def elastic_problems(self) -> list[str]:
        """What is wrong with the arguments of elastic jobs.

        ``num_proc`` is a number or None.
        """
        names = ("num_proc", "min_num_proc", "max_num_proc", "reset_limit")
        return [
            *checks.num_proc_range_problems({self.name_of(name): getattr(self, name) for name in names}),
            *checks.cooldown_problems(self.name_of("cooldown_range"), self.cooldown_range),
        ]

    def name_of(self, argument: str) -> str:
        """What the user calls an argument."""
        return self.names.get(argument, argument)

    def settings(self, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings from the environment, with the timeouts of these options on top."""
        return Settings.from_env(
            environ,
            start_timeout_s=self.start_timeout,
            spark_start_timeout_s=self.start_timeout,
            elastic_timeout_s=self.elastic_timeout,
        )

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The names of the network interfaces to use; empty if none was given."""
        return interface_names(self.nics)

    @property
    def variables(self) -> dict[str, str | None]:
        """The variables for the workers; None removes one."""
        return {**interface_variables(self.nics), **self.variables_but_interface}

    @property
    def variables_but_interface(self) -> dict[str, str | None]:
        """The same, for launchers that find the interface themselves."""
        backend = self.torch_backend or Settings.from_env().torch_backend
        return {**({"HOROVOD_TORCH_BACKEND": backend} if backend else {}), **checks.checked_variables(self.env)}

    def callbacks(self) -> Callbacks:
        """What to do with the workers' output and progress reports."""
        with_timestamp = self.prefix_output_with_timestamp
        on_line = printer(self.stdout, self.stderr, with_timestamp=with_timestamp, verbose=self.verbose)
        callbacks = Callbacks(on_line=on_line, on_event=self.on_event or ignore_event)
        return replace(callbacks, on_call=on_line.begin_call) if isinstance(on_line, LinePrinter) else callbacks

    def task(self, call: bytes, env: Mapping[str, str | None] | None = None) -> Task:
        """The task that runs ``call``, with ``env`` for the workers.

        It is :attr:`variables` by default.
        """
        # as_horovod must be explicit: on another host the agent starts the worker, and does not answer for horovod.
        variables = self.variables if env is None else env
        return Task(call=call, env=variables, executable=self.executable, as_horovod=serves_horovod())

    @property
    def counts(self) -> tuple[int, int]:
        """Workers at the start, and the minimum number of workers."""
        minimum = next((count for count in (self.min_num_proc, self.num_proc) if count is not None), 1)
        return minimum if self.num_proc is None else self.num_proc, minimum


def checked_arguments(fn: Callable[P, R]) -> Callable[P, R]:
    """Let None mean "not given" for arguments of ``fn`` with other defaults.

    NumPy's numbers become Python's own, which locks and messages need.

    An argument that does not exist raises a TypeError that suggests a similar one.
    """
    parameters = inspect.signature(fn).parameters
    names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    callee = fn.__qualname__.removesuffix(".__init__")
    known = [name for name in parameters if name not in ("self", "cls")]

    filled = filler(fn)

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, Real) and hasattr(value, "item") else value

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        if not takes_all:
            require_known(callee, kwargs, known)
        args, kwargs = filled(args, kwargs)
        named = map(plain, args[: len(names)])
        return fn(*named, *args[len(names) :], **{name: plain(value) for name, value in kwargs.items()})

    return wrapper


def require_known(callee: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that ``callee`` has the arguments that it is given.

    Raises:
        TypeError: it does not; the text suggests similar ones.
    """
    unknown, known = sorted(set(given).difference(known)), sorted(name for name in known if name[0] != "_")
    if unknown:
        hints = ", ".join(name + near_miss(name, known) for name in unknown)
        raise TypeError(f"{callee} has no argument {hints}; it has {', '.join(known)}")


def near_miss(name: str, known: Iterable[str]) -> str:
    """The name that was meant by an unknown one, in words to append to it.

    Empty if none is similar.
    """
    known = list(known)
    # Horovod's own documentation says "slot" and "np" where its code says "worker" and "num_proc", and Ray Train's
    # ScalingConfig says "resources_per_worker".
    spelt = name.replace("slot", "worker").replace("_np", "_workers").replace("num_proc", "num_workers")
    spelt = spelt.replace("resources_per", "cpus_per")
    others = [spelt, name.replace("num_workers", "num_proc")]
    near = [other for other in others if other in known]
    near += [found for other in [name, *others] for found in difflib.get_close_matches(other, known, n=1)]
    return f" (did you mean {near[0]}?)" if near else ""


def fields_of(cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of a function that are fields of the dataclass ``cls``.

    They are given as ``locals()`` returns them.
    """
    return {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}


def renamed(old: str, given: Any, new: str, value: Any) -> Any:
    """The value of an argument that may be given under its old name.

    For :func:`checked_arguments` functions.
    """
    if given is None:
        return value
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=4)
    return given
