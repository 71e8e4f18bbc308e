"""Lazy packages, which import the module of a public name on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str], *loaded: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: the name of the package.
        homes: public name -> the module below the package that defines it.
        loaded: public names that the package defines itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*homes, *loaded})

    return get, names
