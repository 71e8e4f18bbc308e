"""No module imports itself by way of others, not even inside a function or for type checking."""

from __future__ import annotations

import grimp

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


def test_imports_have_no_cycles() -> None:
    graph = grimp.build_graph("hvd_cluster", exclude_type_checking_imports=False, cache_dir=None)
    found = cycles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    assert sorted(map(sorted, found)) == sorted(map(sorted, REMAINING))
