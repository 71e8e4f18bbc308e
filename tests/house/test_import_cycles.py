"""No module imports itself by way of others, not even in a function, for type checking, or by a name in a string."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from hvd_cluster.oldpaths.table import TABLE

ROOT = Path(__file__).parents[2]
_HVDRUN = "hvdrun --check-build reports which of them can be imported, and imports none"
_FORCED = "the user's argument or variable asks for it, and a hook would need its import first"
#: What names a module above or beside its own layer in a string, and why.
UPWARDS = {
    ("hvd_cluster.launch.cli.build", "hvd_cluster.mxnet"): _HVDRUN,
    ("hvd_cluster.launch.cli.build", "hvd_cluster.tensorflow"): _HVDRUN,
    ("hvd_cluster.launch.cli.build", "hvd_cluster.torch"): _HVDRUN,
    ("hvd_cluster.launch.torch_group", "hvd_cluster.torch.distributed"): _FORCED,
    ("hvd_cluster.tensorflow.optimizer", "hvd_cluster.keras"): _FORCED,
}
#: Cycles that are still to be broken, by the modules in them. Entries are only ever removed.
REMAINING: list[set[str]] = []


def cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in imports[module]:
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            begin = stack.index(module)
            if len(stack) - begin > 1:
                found.append(set(stack[begin:]))
            del stack[begin:]

    for module in imports:
        if module not in order:
            visit(module)
    return found


def test_a_cycle_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert cycles(imports) == [{"a", "b", "c"}]


def named_modules(path: Path, modules: set[str]) -> Iterator[str]:
    """The modules of ours that a file names in strings: for ``import_module``, or in the table of a lazy package."""
    tree = ast.parse(path.read_text())
    package = ".".join(path.relative_to(ROOT).parent.parts)
    tables = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    local = {id(each) for table in tables if isinstance(table, ast.Dict) for each in table.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            row = TABLE.get(node.value.removeprefix("hvd_cluster."))
            name = node.value if row is None or not node.value.startswith("hvd_cluster.") else row.module
            if path.name == "__init__.py" and id(node) in local and f"{package}.{name}" in modules:
                yield f"{package}.{name}"
            elif name in modules and name != "hvd_cluster":
                yield name


def links() -> dict[str, set[str]]:
    """Module -> what it names in strings, without the tables of old paths, which are made to point upwards."""
    modules = graph().modules
    found = {}
    for path in (ROOT / "hvd_cluster").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name in modules and parts[1] not in {"oldpaths", "compat"}:
            found[name] = set(named_modules(path, modules)) - {name}
    return found


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("hvd_cluster", exclude_type_checking_imports=False, cache_dir=None)


def test_imports_have_no_cycles() -> None:
    named = links()
    imports = {
        module: graph().find_modules_directly_imported_by(module) | named.get(module, set())
        for module in graph().modules
    }
    assert sorted(map(sorted, cycles(imports))) == sorted(map(sorted, REMAINING))


def test_a_module_named_in_a_string_is_in_a_layer_below() -> None:
    """As import-linter demands of import statements."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = {name.strip(): at for at, layer in enumerate(contract["layers"]) for name in layer.split("|")}
    found = set()
    for module, named in links().items():
        for name in named:
            own, other = module.split(".")[1:2], name.split(".")[1:2]
            if own and own != other and layers[own[0]] >= layers[other[0]]:
                found.add((module, name))
    assert found == set(UPWARDS)


def test_strings_that_name_modules_are_found() -> None:
    named = links()
    assert "hvd_cluster.keras" in named["hvd_cluster.tensorflow.optimizer"]
    assert "hvd_cluster.launch.function" in named["hvd_cluster"]
    assert "hvd_cluster.estimators.ray.backend" in named["hvd_cluster.estimators"]
