"""What source code imports, without running it."""

from __future__ import annotations

import ast
import dis
import importlib.util
from collections.abc import Collection, Iterator
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
    """Modules that a function's code imports when run; some may be names in modules.

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


def imported(code: ast.AST, package: str = "", called: Collection[str] = ()) -> set[str]:
    """Modules that a module's source imports on import; some may be names in modules.

    Imports for type checkers are not among them, nor those of a module that is run as a script.

    Args:
        package: the package of the module, which relative imports are relative to.
        called: also what its functions and classes of these names import when they are called.
    """
    found: set[str] = set()
    for node in _running(code, called):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def names_used(code: ast.AST, called: Collection[str]) -> set[str]:
    """Names, also of other modules, that a module's import and ``called`` use."""
    found: set[str] = set()
    imports: set[str] = set()
    attributes: set[tuple[str, str]] = set()
    for node in _running(code, called):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found |= {node.name} if node.asname else set()
            imports.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            attributes.add((getattr(root, "id", ""), node.attr))
    return found | {name for root, name in attributes if root in imports}  # not methods, such as self.fit


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its package does not exist, or it is __main__
        return None


def _running(code: ast.AST, called: Collection[str]) -> Iterator[ast.AST]:
    """The nodes that run on import, and those of functions and classes in ``called``."""
    waiting: list[tuple[ast.AST, Collection[str], bool]] = [(code, called, False)]
    while waiting:
        node, names, is_called = waiting.pop()
        if isinstance(node, ast.If) and any(text in ast.unparse(node.test) for text in ("TYPE_CHECKING", "__main__")):
            continue
        yield node
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            is_called = is_called or node.name in names
            names = names if is_function else ()  # a method runs only if its class is in use
        runs = is_called or not is_function
        waiting += [
            (child, names, is_called) for child in ast.iter_child_nodes(node) if runs or not isinstance(child, ast.stmt)
        ]
