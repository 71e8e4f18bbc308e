"""The module object that stands at an old path and forwards to the new place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hvd_cluster.oldpaths.absent import absent
from hvd_cluster.oldpaths.rows import Row
from hvd_cluster.oldpaths.table import TABLE, children_of

_ABSENT = object()


class Forwarder(ModuleType):
    """A module without content of its own: it shows its row's names, its row's module and the modules below.

    What is assigned is assigned where it lives, so that all see a patched ``horovod.torch.allreduce``; deleting an
    assigned name brings back what was there, which is how ``mock.patch`` and pytest's ``monkeypatch`` undo theirs.
    """

    def __init__(self, name: str, path: str, row: Row, table: Mapping[str, Row] = TABLE) -> None:
        super().__init__(name, doc=f"The old {name}, served by {row.module or 'hvd_cluster'}.")
        vars(self).update(_path=path, _row=row, _children=children_of(path, table), _replaced={})

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # with our module's path, the import system would load its files a second time
            raise AttributeError(name)
        row: Row = vars(self)["_row"]
        if name in row.names:
            module, _, attribute = row.names[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        if name == "__all__":
            return sorted(public for public in dir(self) if not public.startswith("_"))
        if row.module:
            value = getattr(importlib.import_module(row.module), name, _ABSENT)
            if value is not _ABSENT and not _is_submodule(value, row.module):
                return value
        if name in row.absent:
            return absent(self.__name__, name, row.absent[name])
        if name in vars(self)["_children"]:
            try:
                return importlib.import_module(f"{self.__name__}.{name}")
            except ImportError as error:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: {error}") from error
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{self._served_by()}")

    def __setattr__(self, name: str, value: Any) -> None:
        home = self._home_of(name)
        if home is None:
            super().__setattr__(name, value)
        else:
            vars(self)["_replaced"].setdefault(name, getattr(*home, _ABSENT))
            setattr(*home, value)

    def __delattr__(self, name: str) -> None:
        home = self._home_of(name)
        before = vars(self)["_replaced"].pop(name, _ABSENT)
        if home is None:
            super().__delattr__(name)
        elif before is _ABSENT:
            delattr(*home)
        else:
            setattr(*home, before)

    def __reduce__(self) -> tuple[Any, ...]:
        # A script's `import horovod.torch as hvd` is a global of the function that goes to the workers.
        return old_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        row: Row = vars(self)["_row"]
        names = {name for name in super().__dir__() if name.startswith("__")} | set(row.names)
        names |= vars(self)["_children"]
        if row.module:
            module = importlib.import_module(row.module)
            names |= set(getattr(module, "__all__", None) or dir(module))
        return sorted(names)

    def _home_of(self, name: str) -> tuple[ModuleType, str] | None:
        """Where ``name`` lives now; None for a name of this module object alone (dunders, the import system's own)."""
        row: Row = vars(self)["_row"]
        if name.startswith("__") or name in vars(self)["_children"]:
            return None
        if name in row.names:
            module, _, attribute = row.names[name].partition(":")
            return importlib.import_module(module), attribute
        if row.module:
            return importlib.import_module(row.module), name
        return None

    def _served_by(self) -> str:
        row: Row = vars(self)["_row"]
        return f" (it is served by {row.module})" if row.module else " (it is served by hvd_cluster)"


def old_module(name: str) -> ModuleType:
    """The module at an old path, in a process that need not answer for its root yet: a Spark or Ray task, say.

    Raises:
        ImportError: the real Horovod is installed there.
    """
    root = name.partition(".")[0]
    if root != __name__.partition(".")[0] and root not in sys.modules:
        importlib.import_module("hvd_cluster.compat")
    return importlib.import_module(name)


def _is_submodule(value: Any, package: str) -> bool:
    """Whether ``value`` is a module below ``package`` of ours: our own files are not old paths."""
    return isinstance(value, ModuleType) and value.__name__.startswith(f"{package}.")
