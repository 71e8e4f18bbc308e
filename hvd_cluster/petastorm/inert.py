"""Unpickles what may be hostile into values that can do nothing: no class that a pickle names is ever looked up.

A pickle is a program: it names callables and calls them. Here every name that is on a list becomes an :class:`Inert`
class made for this one reading, and calling it, or giving its instances a state, records what was asked and does
nothing else. Even a pickle that patches what it names patches only that. What reads the result (``schema_pickle.py``,
``index_pickle.py``) takes from the records what it knows, and refuses the rest.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Container, Mapping
from typing import Any

#: Larger ones are no schema.
_MAX_BYTES = 64 * 1024 * 1024
#: Opcodes that load from elsewhere than the pickle, name classes in other ways than by GLOBAL and STACK_GLOBAL, or
#: have no place in a value made of classes, texts, numbers and containers.
_REFUSED = frozenset(
    {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ", "NEXT_BUFFER", "READONLY_BUFFER", "BYTEARRAY8"}
)


class UntrustedPickleError(ValueError):
    """A pickle asks for more than a description of data does, or is damaged."""


class Inert:
    """Stands for an instance of a class that a pickle names, or for the result of calling something."""

    #: "module.name", as in the pickle.
    name: str = ""
    #: What it was called with.
    args: tuple[Any, ...]
    #: What its state was set to; None if it was not.
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Inert:
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


class InertMapping(Inert):
    """One that items may be set in."""

    #: The items, in order.
    items: list[tuple[Any, Any]]

    def __new__(cls, *args: Any, **kargs: Any) -> InertMapping:
        self = super().__new__(cls, *args, **kargs)
        vars(self)["items"] = []
        return self  # type: ignore[return-value]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


def load(data: bytes, admitted: Container[str], mappings: Container[str]) -> Any:
    """The value of a pickle, with Inert classes and instances for all that it names.

    Args:
        data: the pickle.
        admitted: the names, "module.name", that it may use.
        mappings: those of them whose instances take items.

    Returns:
        Numbers, str, bytes, None, tuples, lists, dicts, sets, subclasses of Inert (for a name itself) and instances of
        them. Containers may share parts, or hold themselves.

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
    except Exception as error:  # what a damaged pickle raises is without bound: it calls inert things in any way
        raise UntrustedPickleError(f"it is damaged: {type(error).__name__}: {error}") from error


def named(value: Any) -> str:
    """The name that a value stands for, where it is a class that a pickle named; else ""."""
    return str(value.name) if isinstance(value, type) and issubclass(value, Inert) else ""


def made(value: Any) -> str:
    """The name of the class that a value is an instance of, where a pickle named it; else ""."""
    return value.name if isinstance(value, Inert) else ""


def state_of(value: Inert) -> Mapping[Any, Any]:
    """The attributes that an instance was given; {} for none.

    Raises:
        UntrustedPickleError: its state is no dict.
    """
    if value.state is None:
        return {}
    if not isinstance(value.state, dict):
        raise UntrustedPickleError(f"the state of an instance of {value.name} is no dict")
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
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self._admitted:
            raise UntrustedPickleError(f"it names {name[:200]!r}")
        if name not in self._classes:
            base = InertMapping if name in self._mappings else Inert
            self._classes[name] = type("Named", (base,), {"name": name})
        return self._classes[name]
