"""What a model needs to load elsewhere: distributions, and user code in none."""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch

from hvd_cluster.estimators.logged_model.imports import file_of, imported, imported_by, names_used
from hvd_cluster.launch.pickling import modules_in

#: What scoring imports. Releases of MLflow differ in the pyarrow that they allow, so any that we support will do.
_ALWAYS = ("torch", "numpy", "pandas", "cloudpickle")
_UNPINNED = ("pyarrow>=14",)


@dataclass(frozen=True)
class LocalCode:
    """A module or package that is in no distribution."""

    #: Its name, without dots.
    name: str
    #: Its file or folder.
    path: Path


@dataclass(frozen=True)
class Requirements:
    """What a model needs."""

    #: Lines for pip.
    pip: tuple[str, ...]
    local: tuple[LocalCode, ...]


def requirements_of(values: Sequence[Any], modules: Iterable[str] = (), without: Collection[str] = ()) -> Requirements:
    """What unpickling and calling some values needs.

    Args:
        values: functions, modules and other values that cloudpickle takes. Numbers are not pickled.
        modules: names of modules that are needed too.
        without: names of modules that travel with the model.
    """
    names, called = {*_ALWAYS, *modules}, set[str]()
    for value in values:
        pickled, imports, named = _pickled(value)
        names |= modules_in(pickled) | imports
        called |= named
    waiting = {name for name in names if not _is_by_value(name) and name not in without}
    local: dict[str, LocalCode] = {}
    distributions: set[str] = set()
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        top = module.partition(".")[0]
        if module in seen or top in sys.stdlib_module_names:
            continue
        seen.add(module)
        if found := _distributions(top, module):
            distributions |= set(found)
        elif top not in local and (code := _local_code(top)) is not None:
            local[top] = code
            waiting |= _imports_of(local.values(), called) - set(without)
    pins = {f"{name}=={metadata.version(name).partition('+')[0]}" for name in distributions - {"pyarrow"}}
    return Requirements(tuple(sorted({*pins, *_UNPINNED})), tuple(local[name] for name in sorted(local)))


class _WithoutNumbers(cloudpickle.Pickler):
    """Pickler without tensor and array content; keeps what functions import and name.

    Args:
        sink: gets the pickle.
        is_model: the model is logged so that it loads without the modules of ours that its class names.
    """

    def __init__(self, sink: io.BytesIO, is_model: bool) -> None:
        super().__init__(sink)
        self._is_model = is_model
        self.imports: set[str] = set()
        self.named: set[str] = set()

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, CodeType):
            self.imports |= imported_by(value)
            self.named |= set(value.co_names)
        elif isinstance(value, (type, FunctionType)):
            self.named.add(value.__qualname__.partition(".")[0])
        if self._is_model and isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "hvd_cluster":
            return "ours"
        return "numbers" if isinstance(value, (torch.Tensor, torch.UntypedStorage, np.ndarray)) else None


def _pickled(value: Any) -> tuple[bytes, set[str], set[str]]:
    """The pickle, what its functions import when called, and names that it may call.

    Of the imports some may be names in modules.
    """
    sink = io.BytesIO()
    pickler = _WithoutNumbers(sink, isinstance(value, torch.nn.Module))
    pickler.dump(value)
    return sink.getvalue(), pickler.imports, pickler.named


def imports_of(value: Any) -> set[str]:
    """Modules that ``value``'s functions import when called and that do not travel."""
    return {name for name in _pickled(value)[1] if not _is_by_value(name)}


def _is_by_value(module: str) -> bool:
    """Whether cloudpickle copies the module's functions, so that it is not needed."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return module == "__main__" or any(
        f"{module}.".startswith(f"{name}.") or name.startswith(f"{module}.") for name in registered
    )


@cache
def _packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _distributions(top: str, module: str) -> list[str]:
    """The distributions of a module, by its first name; a namespace's hold its file."""
    names = sorted(set(_packages().get(top, [])))
    if len(names) < 2:
        return names
    file = getattr(sys.modules.get(module), "__file__", None) or file_of(module)
    return _owners(top).get(str(file), [])


@cache
def _owners(top: str) -> Mapping[str, list[str]]:
    """File -> the distributions that hold it, of the distributions of a namespace."""
    found: dict[str, list[str]] = {}
    for name in sorted(set(_packages()[top])):
        for file in metadata.files(name) or ():
            found.setdefault(str(file.locate()), []).append(name)
    return found


def _local_code(top: str) -> LocalCode | None:
    """The code of a module that is not installed; None if absent or not in Python."""
    module = sys.modules.get(top)
    spec = getattr(module, "__spec__", None) or (importlib.util.find_spec(top) if module is None else None)
    if spec is None or _is_by_value(top) or (spec.origin is None and top in _packages()):  # an installed namespace
        return None
    if spec.submodule_search_locations:
        return LocalCode(top, Path(next(iter(spec.submodule_search_locations))))
    file = Path(spec.origin) if spec.origin else None
    installed = Path(sysconfig.get_paths()["purelib"])
    if file is None or file.suffix != ".py" or not file.is_file() or installed in file.parents:
        return None
    return LocalCode(top, file)


def _imports_of(local: Iterable[LocalCode], called: set[str]) -> set[str]:
    """Imports of local code, and of its functions and classes that scoring calls.

    Args:
        called: the names of those, to which this adds the names of what they use in turn. Code that scoring does not
            use, such as a script's ``main()``, may import what is not installed where the model is loaded.
    """
    sources: list[tuple[ast.AST, str]] = []
    for code in local:
        for file in code.path.rglob("*.py") if code.path.is_dir() else [code.path]:
            package = ".".join([code.name, *file.parent.relative_to(code.path).parts]) if code.path.is_dir() else ""
            sources.append((ast.parse(file.read_text(encoding="utf-8")), package))
    known = -1
    while known < len(called):
        known = len(called)
        for source, _ in sources:
            called |= names_used(source, called)
    return {name for source, package in sources for name in imported(source, package, called)}
