"""The user's function and its arguments, as bytes that go to the workers."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import linecache
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.frame_origin import is_user_code
from hvd_cluster.launch.pickling import Dumps, References, dumps, loads

_MAX_SOURCE_BYTES = 1 << 20
_MAX_DEPTH = 4
#: How workers that this package's own launchers start come to a module; the others have texts of their own.
HOST_REMEDY = "install it on every host, or put its folder on PYTHONPATH there (env={'PYTHONPATH': ...})"
_REMEDY = "Create it inside the function, or pass what it is made from (a path, a number, a state_dict) as an argument."
_SPARK_REMEDY = (
    "Sessions, DataFrames and RDDs of Spark work on the driver only. Use them before the call, and pass the result "
    "to the workers: the path of the data or of a store, or rows that fit into memory (df.toPandas()). "
    "An estimator takes a DataFrame as it is: TorchEstimator(...).fit(df)."
)
#: Packages whose objects never leave the driver, with what to do; their attributes tell a user nothing.
_DRIVER_ONLY = {"pyspark": _SPARK_REMEDY, "py4j": _SPARK_REMEDY}
#: Characters of an argument in an error.
_MAX_SHOWN = 80


@dataclass(frozen=True)
class PackedCall:
    """What travels; readable before any of the user's classes is imported."""

    #: Name of the function, for messages.
    name: str
    #: The pickled (function, args, kwargs).
    body: bytes
    #: Source text of the file or notebook cell that defines the function, for tracebacks where that file is not.
    source: tuple[str, str] | None
    #: What ``body`` refers to; the launcher that packed it carries them.
    references: References = ()
    #: How a module that workers of this launcher lack comes to them, as the end of a sentence.
    remedy: str = HOST_REMEDY


def pack(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shared_path: bool = True,
    remedy: str = HOST_REMEDY,
) -> bytes:
    """Pickle a call: :func:`pack_call` for a launcher that sends bytes."""
    return pickle.dumps(pack_call(fn, args, kwargs, shared_path=shared_path, remedy=remedy))


def pack_call(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shared_path: bool = True,
    dumps: Dumps = dumps,
    remedy: str = HOST_REMEDY,
) -> PackedCall:
    """Pickle a call. Functions of a script, a notebook, lambdas and closures travel by value.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        shared_path: the workers find modules where this process does. If not, everything from the module of ``fn``
            travels by value, unless that is an installed one; so it does in any case when no import could find it.
        dumps: pickles it; that of a cluster which has objects of its own.
        remedy: how a module that the workers lack comes to them, for the error of a worker that cannot import it.

    Raises:
        TypeError: ``fn`` is not callable, ``args`` are no sequence of arguments, or ``kwargs`` no mapping.
        LaunchError: something in the call cannot be pickled; the text names each variable and its type.
    """
    if not callable(fn):
        raise TypeError(f"the first argument must be a function that the workers can call, not {type(fn).__name__}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"args={_shown(args)} must be a list or tuple of the function's arguments, e.g. args=(x,)")
    if not isinstance(kwargs or {}, Mapping):
        raise TypeError(f"kwargs={_shown(kwargs)} must be a dict of the function's named arguments")
    call = (fn, tuple(args), dict(kwargs or {}))
    with _by_value(_travelling_module(fn, shared_path)):
        try:
            body, references = dumps(call)
        except Exception as error:  # pickling runs user code, which may raise anything
            raise LaunchError(_unpicklable_text(*call, error, dumps)) from error
    return PackedCall(_name_of(fn), body, _source_of(fn), references, remedy)


def unpack(packed: bytes | PackedCall) -> Callable[..., Any]:
    """What :func:`pack` or :func:`pack_call` packed, as a function that needs no arguments.

    Trusts the bytes: check who sent them first.

    Raises:
        LaunchError: the function cannot be rebuilt here. Where a module is missing, the text names it and the remedy.
    """
    parcel: PackedCall = packed if isinstance(packed, PackedCall) else pickle.loads(packed)
    if parcel.source is not None:
        file, text = parcel.source
        if not Path(file).exists():
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        fn, args, kwargs = loads(parcel.body, parcel.references)
    except ImportError as error:
        raise LaunchError(
            f"{parcel.name} cannot be rebuilt on the worker: {unimportable_text(error, parcel.remedy)}"
        ) from error
    except Exception as error:  # unpickling runs the user's code, which may raise anything
        raise LaunchError(
            f"{parcel.name} cannot be rebuilt on the worker ({type(error).__name__}: {error}): classes and functions "
            "that it uses must be the same there as on the driver"
        ) from error
    return functools.partial(fn, *args, **kwargs)


def unimportable_text(error: ImportError, remedy: str) -> str:
    """What this process cannot import, and what to do about it.

    Args:
        error: of :func:`~hvd_cluster.launch.pickling.loads`.
        remedy: how modules come to the workers of this launcher.
    """
    name = error.name or "a module"
    return (
        f"{sys.executable} on {socket.gethostname()} cannot import {name!r} ({type(error).__name__}: {error}). "
        f"The workers need it: {remedy}. A module of your own can also travel with the call: "
        f"cloudpickle.register_pickle_by_value({error.name or 'module'}) on the driver, before it"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def _plain_function(fn: Any) -> Any:
    """The Python function inside partials, bound methods and decorators' wrappers."""
    while True:
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", fn)
        if inner is fn:
            return inspect.unwrap(fn) if inspect.isfunction(fn) else fn
        fn = inner


def _source_of(fn: Callable[..., Any]) -> tuple[str, str] | None:
    code = getattr(_plain_function(fn), "__code__", None)
    if code is None or not is_user_code(code.co_filename):
        return None
    text = "".join(linecache.getlines(code.co_filename))
    return (code.co_filename, text) if 0 < len(text) <= _MAX_SOURCE_BYTES else None


def _travelling_module(fn: Callable[..., Any], shared_path: bool) -> ModuleType | None:
    """The module of ``fn`` if the workers could not import it."""
    module = sys.modules.get(getattr(_plain_function(fn), "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__" or not is_user_code(file):
        return None  # built in, installed, or taken by value by cloudpickle itself
    return None if shared_path and _importable(module.__name__) else module


def _importable(name: str) -> bool:
    """Whether an import would find the module, had it not been loaded from a path as test modules are."""
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


@contextlib.contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Have cloudpickle take the functions and classes of ``module`` by value."""
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _unpicklable_text(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception, dumps: Dumps
) -> str:
    parts = [
        _parts_of(fn),
        [(f"argument {index}", value) for index, value in enumerate(args)],
        [(f"argument {name!r}", value) for name, value in kwargs.items()],
    ]
    culprits = [culprit for each in parts for culprit in _culprits(each, set(), _MAX_DEPTH, dumps)]
    listed = "\n".join(f"  - {where}: {_type_name(value)}" for where, value in culprits)
    found = f"; this cannot be pickled:\n{listed}\n" if listed else ": "
    remedies = dict.fromkeys(_DRIVER_ONLY.get(_package_of(value), _REMEDY) for _, value in culprits) or [_REMEDY]
    reason = next(iter(str(error).splitlines()), "")
    return f"{_name_of(fn)} cannot be sent to the workers{found}({type(error).__name__}: {reason})\n" + "\n".join(
        remedies
    )


def _parts_of(fn: Any) -> list[tuple[str, Any]]:
    """What travels with a function, each with a name that its author recognises."""
    if isinstance(fn, functools.partial):
        bound = [*enumerate(fn.args), *fn.keywords.items()]
        return _parts_of(fn.func) + [(f"argument {name!r} of the partial", value) for name, value in bound]
    if inspect.ismethod(fn):
        return [("the object that the method is bound to", fn.__self__), *_parts_of(fn.__func__)]
    if not inspect.isfunction(fn):
        return [("the callable object", fn)]
    try:
        captured = inspect.getclosurevars(fn)
    except ValueError:  # a cell that is still empty
        return []
    names = [(f"captured variable {name!r}", value) for name, value in captured.nonlocals.items()]
    names += [(f"global variable {name!r}", value) for name, value in captured.globals.items()]
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return names + [("a default argument", value) for value in defaults]


def _culprits(parts: Sequence[tuple[str, Any]], seen: set[int], depth: int, dumps: Dumps) -> Iterator[tuple[str, Any]]:
    """Those of ``parts`` that cannot be pickled, each followed down to the innermost thing that is to blame."""
    for where, value in parts:
        if id(value) in seen or _picklable(value, dumps):
            continue
        seen.add(id(value))
        opaque = not depth or _package_of(value) in _DRIVER_ONLY
        inner = [] if opaque else list(_culprits(_inside(where, value), seen, depth - 1, dumps))
        yield from inner or [(where, value)]


def _inside(where: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{where}, item {key!r}", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"{where}, item {index}", item) for index, item in enumerate(value)]
    if inspect.isfunction(value) or inspect.ismethod(value) or isinstance(value, functools.partial):
        return [(f"{where}, {name}", item) for name, item in _parts_of(value)]
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or inspect.isclass(value):
        return []
    return [(f"{where}, attribute {name!r} of {_type_name(value)}", item) for name, item in attributes.items()]


def _picklable(value: Any, dumps: Dumps) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - reducing runs user code, which may raise anything; here any failure is the answer
        return False
    return True


def _package_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _type_name(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
