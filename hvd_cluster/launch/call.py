"""Packs the user's function and its arguments as bytes for the workers."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import FileLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.outcome import is_user_code
from hvd_cluster.launch.pickling import Dumps, References, by_value, dumps, loads

_MAX_SOURCE_BYTES = 1 << 20
_MAX_DEPTH = 4
#: How to make a module available to workers of this package's own launchers; the other launchers have their own texts.
HOST_REMEDY = "install it on every host, or put its folder on PYTHONPATH there (env={'PYTHONPATH': ...})"
_REMEDY = "Create it inside the function, or pass what it is made from (a path, a number, a state_dict) as an argument."
_SPARK_REMEDY = (
    "Spark sessions, DataFrames and RDDs work on the driver only. Use them before the call and pass the result to the "
    "workers: the path of the data or of a store, or rows that fit into memory (df.toPandas()). An estimator takes a "
    "DataFrame directly: TorchEstimator(...).fit(df)."
)
#: Packages whose objects must stay on the driver -> what to do; their attributes are not shown to the user.
_DRIVER_ONLY = {"pyspark": _SPARK_REMEDY, "py4j": _SPARK_REMEDY}
#: What the pickle of a Spark Connect session, or of its DataFrames, calls when it is unpickled. Only the process that
#: made them can.
_SESSION_OF_ITS_PROCESS = b"_getActiveSessionIfMatches"
#: Characters of an argument that an error message shows.
_MAX_SHOWN = 80


@dataclass(frozen=True)
class PackedCall:
    """A packed call.

    It can be unpickled before any of the user's classes is imported.
    """

    #: The function's name, for messages.
    name: str
    #: The pickled (function, args, kwargs).
    body: bytes
    #: Name and text of the file or notebook cell that defines the function, for tracebacks on hosts without that file.
    source: tuple[str, str] | None
    #: Objects that ``body`` refers to; the launcher that packed it transports them.
    references: References = ()
    #: How to make a missing module available to workers of this launcher, as the end of a sentence.
    remedy: str = HOST_REMEDY


def pack(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shared_path: bool = True,
    remedy: str = HOST_REMEDY,
) -> bytes:
    """Pickle a call to bytes; see :func:`pack_call`."""
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
    """Pickle a call.

    Functions of scripts and notebooks, lambdas and closures are pickled by value.

    Args:
        shared_path: whether the workers find modules where this process does. If not, the module of ``fn`` is pickled
            by value unless it is installed, or ``fn`` uses a value of it that cannot be pickled. A module that no
            import could find is always pickled by value.
        dumps: the pickler, for clusters that have objects of their own.
        remedy: how to make a missing module available, for the error of a worker that cannot import it.

    Raises:
        TypeError: ``fn`` is not callable, ``args`` is not a sequence of arguments, or ``kwargs`` is not a mapping.
        LaunchError: something in the call cannot be pickled; the message names each variable and its type.
    """
    if not callable(fn):
        raise TypeError(f"the first argument must be a function that the workers can call, not {type(fn).__name__}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"args={_shown(args)} must be a list or tuple of the function's arguments, e.g. args=(x,)")
    if not isinstance(kwargs or {}, Mapping):
        raise TypeError(f"kwargs={_shown(kwargs)} must be a dict of the function's named arguments")
    call = (fn, tuple(args), dict(kwargs or {}))
    module = _module_by_value(fn, shared_path)
    try:
        with _by_value(module):
            body, references = _dumped(call, dumps)
    except Exception as error:  # pickling runs user code, which may raise anything
        # A module with a lock or a file goes by its name: the workers may have it too, and say so if not.
        if module is None or not _importable(module.__name__) or not _picklable(call, dumps):
            with _by_value(module):
                raise LaunchError(_unpicklable_text(*call, error, dumps)) from error
        body, references = _dumped(call, dumps)
    return PackedCall(_name_of(fn), body, _source_of(fn), references, remedy)


def unpack(packed: bytes | PackedCall) -> Callable[..., Any]:
    """The function that :func:`pack` or :func:`pack_call` packed, without parameters.

    It unpickles the bytes: check who sent them first.

    Raises:
        LaunchError: the function cannot be rebuilt here; the message names missing modules and the remedy.
    """
    call: PackedCall = packed if isinstance(packed, PackedCall) else pickle.loads(packed)
    if call.source is not None:
        file, text = call.source
        if not Path(file).exists():
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        fn, args, kwargs = loads(call.body, call.references)
    except ImportError as error:
        raise LaunchError(
            f"{call.name} cannot be rebuilt on the worker: {unimportable_text(error, call.remedy)}"
        ) from error
    except Exception as error:  # unpickling runs user code, which may raise anything
        raise LaunchError(
            f"{call.name} cannot be rebuilt on the worker ({type(error).__name__}: {error}): classes and functions "
            "that it uses must be the same there as on the driver"
        ) from error
    return functools.partial(fn, *args, **kwargs)


def unimportable_text(error: ImportError, remedy: str) -> str:
    """What this process cannot import, and what to do about it."""
    name = error.name or "a module"
    return (
        f"{sys.executable} on {socket.gethostname()} cannot import {name!r} ({type(error).__name__}: {error}). "
        f"The workers need it: {remedy}. Your own modules can also be sent with the call: run "
        f"cloudpickle.register_pickle_by_value({error.name or 'module'}) on the driver first"
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


def _module_by_value(fn: Callable[..., Any], shared_path: bool) -> ModuleType | None:
    """The module of ``fn`` if the workers cannot import it.

    It must then be pickled by value.
    """
    module = sys.modules.get(getattr(_plain_function(fn), "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__" or not is_user_code(file):
        return None  # built in, installed, or pickled by value anyway
    return None if shared_path and _importable(module.__name__) else module


def _importable(name: str) -> bool:
    """Whether an import would find the module if it were not loaded already.

    Test modules are loaded by their path.
    """
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _spec_of(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def _spec_of(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """How an import finds a module: on ``path`` or ``sys.path``, or by a finder.

    Editable installs have a finder. A finder that loads modules in its own way, such as one for notebooks, may exist in
    this process only.
    """
    if (spec := PathFinder.find_spec(name, path)) is not None:
        return spec
    specs = [finder.find_spec(name, path, None) for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return next((spec for spec in specs if spec is not None and isinstance(spec.loader, FileLoader)), None)


def _by_value(module: ModuleType | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if module is None else by_value(module)


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
    """The objects that are pickled with a function, each with a description."""
    if isinstance(fn, functools.partial):
        bound = [*enumerate(fn.args), *fn.keywords.items()]
        return _parts_of(fn.func) + [(f"argument {name!r} of the partial", value) for name, value in bound]
    if inspect.ismethod(fn):
        return [("the object that the method is bound to", fn.__self__), *_parts_of(fn.__func__)]
    if not inspect.isfunction(fn):
        return [("the callable object", fn)]
    enclosing, module = captured(fn)
    names = [(f"captured variable {name!r}", value) for name, value in enclosing.items()]
    names += [(f"global variable {name!r}", value) for name, value in module.items()]
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return names + [("a default argument", value) for value in defaults]


def captured(fn: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables that a function uses.

    They are those of the functions around it and of its module. ``inspect.getclosurevars`` does not return any if one
    of them is not set yet; here only that one is missing.
    """
    enclosing: dict[str, Any] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            enclosing[name] = cell.cell_contents
    return enclosing, {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}


def _culprits(parts: Sequence[tuple[str, Any]], seen: set[int], depth: int, dumps: Dumps) -> Iterator[tuple[str, Any]]:
    """The ``parts`` that cannot be pickled, each reduced to its innermost cause."""
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


def _dumped(value: Any, dumps: Dumps) -> tuple[bytes, References]:
    body, references = dumps(value)
    if _SESSION_OF_ITS_PROCESS in body:
        raise TypeError("a session of Spark Connect works in its own process only")
    return body, references


def _picklable(value: Any, dumps: Dumps) -> bool:
    try:
        _dumped(value, dumps)
    except Exception:  # noqa: BLE001 - reducing runs user code, which may raise anything
        return False
    return True


def _package_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _type_name(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
