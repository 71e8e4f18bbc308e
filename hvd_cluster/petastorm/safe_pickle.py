"""Unpickles untrusted data without importing or calling anything that it names.

A pickle is a program: it names callables and calls them. Here each name on an allow list becomes a subclass of
:class:`PickledObject`, made for this one load. Calling it, or setting the state of an instance, only records the
arguments, so a pickle can change nothing but its own result. ``schema_pickle.py`` and ``row_group_index.py`` read the
records that they know, and refuse all others.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Container, Mapping
from typing import Any

#: A larger pickle cannot be a schema.
_MAX_BYTES = 64 * 1024 * 1024
#: Opcodes that load from elsewhere than the pickle, name classes in other ways than by GLOBAL and STACK_GLOBAL, or
#: have no place in a value made of classes, texts, numbers and containers.
_REFUSED = frozenset(
    {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ", "NEXT_BUFFER", "READONLY_BUFFER", "BYTEARRAY8"}
)


class UntrustedPickleError(ValueError):
    """A pickle asks for more than a description of data does, or is damaged."""


class PickledObject:
    """Stands for an instance of a class that a pickle names.

    Or for the result of calling something that it names.
    """

    #: "module.name", as in the pickle.
    name: str = ""
    #: What it was called with.
    args: tuple[Any, ...]
    #: What its state was set to; None if it was not.
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> PickledObject:
        self = super().__new__(cls)
        self.args = args
        self.state = None
        return self

    def __init__(self, *args: Any, **kargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        raise UntrustedPickleError(f"it appends to an instance of {self.name}")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UntrustedPickleError(f"it sets items of an instance of {self.name}")


class PickledMapping(PickledObject):
    """One that items may be set in."""

    #: The items, in order.
    items: list[tuple[Any, Any]]

    def __new__(cls, *args: Any, **kargs: Any) -> PickledMapping:
        self = super().__new__(cls, *args, **kargs)
        vars(self)["items"] = []
        return self  # type: ignore[return-value]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


def load(data: bytes, admitted: Container[str], mappings: Container[str]) -> Any:
    """The value of a pickle, with PickledObject in place of the classes it names.

    Args:
        data: the pickle.
        admitted: the names, "module.name", that it may use.
        mappings: those of them whose instances take items.

    Returns:
        Numbers, str, bytes, None, tuples, lists, dicts, sets, subclasses of PickledObject (for a bare name) and their
        instances. Containers may share parts, or hold themselves.

    Raises:
        UntrustedPickleError: another name is asked for, or the pickle is damaged or too large.
    """
    if len(data) > _MAX_BYTES:
        raise UntrustedPickleError(f"it has {len(data)} bytes")
    _check_opcodes(data)
    try:
        return _Unpickler(data, admitted, mappings).load()
    except UntrustedPickleError:
        raise
    except Exception as error:  # a damaged pickle may call anything in any way, and so raise anything
        raise UntrustedPickleError(f"it is damaged: {type(error).__name__}: {error}") from error


def named(value: Any) -> str:
    """The name of the class that a value is, where a pickle named it; else ""."""
    return str(value.name) if isinstance(value, type) and issubclass(value, PickledObject) else ""


def made(value: Any) -> str:
    """The name of a value's class, where a pickle named it; else ""."""
    return value.name if isinstance(value, PickledObject) else ""


def state_of(value: PickledObject) -> Mapping[Any, Any]:
    """The attributes that an instance was given; {} for none."""
    if value.state is None:
        return {}
    if not isinstance(value.state, dict):
        raise UntrustedPickleError(f"the state of an instance of {value.name} is not a dict")
    return value.state


def _check_opcodes(data: bytes) -> None:
    try:
        for opcode, arg, _ in pickletools.genops(data):
            if opcode.name in _REFUSED:
                raise UntrustedPickleError(f"it uses the opcode {opcode.name}")
            # A number larger than the pickle would make the unpickler reserve memory for that many values.
            if opcode.name in {"PUT", "BINPUT", "LONG_BINPUT"} and not 0 <= int(arg or 0) <= len(data):
                raise UntrustedPickleError(f"it numbers a value {arg}")
    except UntrustedPickleError:
        raise
    except Exception as error:  # pickletools promises no particular error on damaged data
        raise UntrustedPickleError(f"it is damaged: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, admitted: Container[str], mappings: Container[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._admitted = admitted
        self._mappings = mappings
        self._classes: dict[str, type[PickledObject]] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self._admitted:
            raise UntrustedPickleError(f"it names {name[:200]!r}")
        if name not in self._classes:
            base = PickledMapping if name in self._mappings else PickledObject
            self._classes[name] = type("Named", (base,), {"name": name})
        return self._classes[name]
