"""What source code imports, without running it."""

from __future__ import annotations

import ast
import dis
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from types import CodeType


def is_package(module: str) -> bool:
    """Whether a module is a package."""
    spec = _spec(module)
    return spec is not None and spec.submodule_search_locations is not None


@cache
def source_of(module: str) -> str | None:
    """The source of a module; None if there is no such module, or none in Python."""
    spec = _spec(module)
    get_source = getattr(spec and spec.loader, "get_source", None)
    try:
        found: str | None = get_source(module) if get_source is not None else None
    except (ImportError, UnicodeDecodeError):
        return None
    return found


def file_of(module: str) -> str | None:
    """The file of a module; None if there is no such module, or it has none."""
    spec = _spec(module)
    return spec.origin if spec is not None and spec.has_location else None


def imported_by(code: CodeType) -> set[str]:
    """The names of modules that a function's code imports when it runs; some may be names in modules.

    Those of functions in it are not among them, nor are relative imports.
    """
    found: set[str] = set()
    module = ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = step.argval
            found.add(module)
        elif step.opname == "IMPORT_FROM":
            found.add(f"{module}.{step.argval}")
    return {name for name in found if name.partition(".")[0] and _spec(name.partition(".")[0]) is not None}


def imported(source: str, package: str = "", *, in_functions: bool = False) -> set[str]:
    """The names of modules that a module's source imports when it is imported; some may be names in modules.

    Imports for type checkers are not among them.

    Args:
        package: the package of the module, which relative imports are relative to.
        in_functions: also those that its functions import when they are called.
    """
    found: set[str] = set()
    for node in _at_import(ast.parse(source).body, in_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its package does not exist, or it is __main__
        return None


def _at_import(statements: Iterable[ast.stmt], in_functions: bool) -> Iterator[ast.stmt]:
    """The statements that run on import, those in blocks included; those of functions too, if asked."""
    for node in statements:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _at_import(getattr(node, block, []), in_functions)
            for handler in getattr(node, "handlers", []):
                yield from _at_import(handler.body, in_functions)
