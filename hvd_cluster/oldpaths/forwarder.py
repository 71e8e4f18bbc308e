"""The module object at an old path, which forwards to the new module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hvd_cluster.oldpaths.absent import absent
from hvd_cluster.oldpaths.rows import Row
from hvd_cluster.oldpaths.table import TABLE, children_of, homes_of

_ABSENT = object()


class Forwarder(ModuleType):
    """A module without its own content.

    It has the names of its row, of the row's module and of the modules below. Assigning to a name assigns it in the
    module that defines it, so that a patched ``horovod.torch.allreduce`` is patched everywhere. Deleting an assigned
    name restores the previous value: ``mock.patch`` and pytest's ``monkeypatch`` undo their changes in this way.
    """

    def __init__(self, name: str, path: str, row: Row, table: Mapping[str, Row] = TABLE) -> None:
        super().__init__(name, doc=f"The old {name}, served by {row.module or 'hvd_cluster'}.")
        vars(self).update(_path=path, _row=row, _children=children_of(path, table), _replaced={})

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # with our module's __path__, the import system would load its files again
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
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{self._served_by(name)}")

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
        # A script's `import horovod.torch as hvd` is a global of the function that is sent to the workers.
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
        """The module and attribute of a name now.

        None for names of this module object only, such as dunders.
        """
        row: Row = vars(self)["_row"]
        if name.startswith("__") or name in vars(self)["_children"]:
            return None
        if name in row.names:
            module, _, attribute = row.names[name].partition(":")
            return importlib.import_module(module), attribute
        if row.module:
            return importlib.import_module(row.module), name
        return None

    def _served_by(self, name: str) -> str:
        row: Row = vars(self)["_row"]
        homes = homes_of(name)
        elsewhere = f"; {' and '.join(homes)} has that name" if homes else ""
        return f" (it is served by {row.module or 'hvd_cluster'}{elsewhere})"


def old_module(name: str) -> ModuleType:
    """The module at an old path, whether or not its root is served.

    A Spark or Ray task may not serve it yet.

    Raises:
        ImportError: the real Horovod is installed.
    """
    root = name.partition(".")[0]
    if root != __name__.partition(".")[0] and root not in sys.modules:
        importlib.import_module("hvd_cluster.compat")
    return importlib.import_module(name)


def _is_submodule(value: Any, package: str) -> bool:
    """Whether a value is a submodule of ``package``.

    Our own files are not old paths.
    """
    return isinstance(value, ModuleType) and value.__name__.startswith(f"{package}.")
