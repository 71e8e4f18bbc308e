"""What a model needs to be loaded elsewhere: distributions to install, and code of the user's that is in none."""

from __future__ import annotations

import importlib.util
import io
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from hvd_cluster.estimators.logged_model.imports import imported
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
    names = {*_ALWAYS, *modules, *(name for value in values for name in modules_in(_pickled(value)))}
    needed = {name.partition(".")[0]: name for name in names if not _is_by_value(name) and name not in without}
    local: dict[str, LocalCode] = {}
    distributions: set[str] = set()
    waiting = needed
    seen: set[str] = set()
    while waiting:
        top, module = waiting.popitem()
        if top in seen or top in sys.stdlib_module_names:
            continue
        seen.add(top)
        if found := _distributions(top, module):
            distributions |= set(found)
        elif (code := _local_code(top)) is not None:
            local[top] = code
            waiting |= {name.partition(".")[0]: name for name in _imports_of(code)}
    pins = {f"{name}=={metadata.version(name).partition('+')[0]}" for name in distributions - {"pyarrow"}}
    return Requirements(tuple(sorted({*pins, *_UNPINNED})), tuple(local[name] for name in sorted(local)))


class _WithoutNumbers(cloudpickle.Pickler):
    """Pickles all but the content of tensors and arrays."""

    def persistent_id(self, value: Any) -> str | None:
        return "numbers" if isinstance(value, (torch.Tensor, torch.UntypedStorage, np.ndarray)) else None


def _pickled(value: Any) -> bytes:
    sink = io.BytesIO()
    _WithoutNumbers(sink).dump(value)
    return sink.getvalue()


def _is_by_value(module: str) -> bool:
    """Whether cloudpickle puts the module's functions into the pickle, so that it and its package are not needed."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return module == "__main__" or any(
        f"{module}.".startswith(f"{name}.") or name.startswith(f"{module}.") for name in registered
    )


@cache
def _packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _distributions(top: str, module: str) -> list[str]:
    """The distributions that hold a module, by the first part of its name; those of a namespace hold its file."""
    names = sorted(set(_packages().get(top, [])))
    if len(names) < 2:
        return names
    file = getattr(sys.modules.get(module), "__file__", None)
    return [
        name
        for name in names
        if file is not None and any(Path(str(one.locate())) == Path(file) for one in metadata.files(name) or ())
    ]


def _local_code(top: str) -> LocalCode | None:
    """The code of a module that is not installed; None if it is not in Python, or there is none."""
    module = sys.modules.get(top)
    spec = getattr(module, "__spec__", None) or (importlib.util.find_spec(top) if module is None else None)
    if spec is None or _is_by_value(top):
        return None
    if spec.submodule_search_locations:
        return LocalCode(top, Path(next(iter(spec.submodule_search_locations))))
    file = Path(spec.origin) if spec.origin else None
    installed = Path(sysconfig.get_paths()["purelib"])
    if file is None or file.suffix != ".py" or not file.is_file() or installed in file.parents:
        return None
    return LocalCode(top, file)


def _imports_of(code: LocalCode) -> set[str]:
    files = code.path.rglob("*.py") if code.path.is_dir() else [code.path]
    found: set[str] = set()
    for file in files:
        package = ".".join([code.name, *file.parent.relative_to(code.path).parts]) if code.path.is_dir() else ""
        found |= imported(file.read_text(encoding="utf-8"), package)
    return found
