"""Horovod's public names and arguments, as recorded, answer at their old paths: same order, same defaults."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("horovod-0.28.1.txt")
#: What a namespace needs to be imported.
NEEDS = {"tensorflow": "tensorflow", "keras": "keras", "spark": "pyspark"}

# Prints the arguments of every path that it is given: name, default as source text ("" for none), and its kind.
DESCRIBE = """
import importlib, inspect, json, sys
import hvd_cluster.compat

def value_of(path):
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)

def arguments_of(path):
    found = value_of(path)
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        [p.name, "" if p.default is inspect.Parameter.empty else repr(p.default), str(p.kind)] for p in parameters
    ]

answers = {}
for path in json.load(sys.stdin):
    try:
        answers[path] = arguments_of(path)
    except Exception as error:
        answers[path] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""


def recorded() -> Iterator[tuple[str, list[tuple[str, str]] | None]]:
    """Each old path, with its arguments and the source of their defaults; None where only the name is recorded."""
    prefixes = [""]
    for line in RECORD.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            prefixes = [f"horovod.{name.strip()}." for name in line.strip("[]").split(",")]
            continue
        name, has_arguments, _ = line.partition("(")
        arguments = None
        if has_arguments:
            function = ast.parse(f"def f{line[len(name) :]}: pass").body[0]
            assert isinstance(function, ast.FunctionDef)
            given = function.args
            defaults = [""] * (len(given.args) - len(given.defaults)) + [ast.unparse(each) for each in given.defaults]
            arguments = list(zip([each.arg for each in given.args], defaults, strict=True))
        for prefix in prefixes:
            yield f"{prefix}{name}", arguments


def differences(expected: list[tuple[str, str]], ours: list[list[str]]) -> list[str]:
    """What a call in Horovod's spelling would stumble over."""
    positional = [name for name, _, kind in ours if kind in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    positional = positional or [name for name, _, kind in ours if "positional" in kind.lower()]
    found = []
    names = [name for name, _ in expected]
    if positional[: len(names)] != names:
        found.append(f"arguments are {positional[: len(names)]}")
    by_name = {name: default for name, default, _ in ours}
    for name, default in expected:
        ours_default = by_name.get(name, "")
        if default and default != "..." and ours_default != default:
            found.append(f"{name}={ours_default or 'required'}")
        if not default and ours_default:
            continue  # more may be left out here
    has_extras = [name for name, default, kind in ours if name not in names and not default and "VAR" not in kind]
    return found + [f"{name} is required" for name in has_extras if "*" not in name and name in positional]


def test_names_and_arguments_are_horovods() -> None:
    rows = [
        (path, arguments)
        for path, arguments in recorded()
        if all(find_spec(needed) for name, needed in NEEDS.items() if f".{name}." in path)
    ]
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE],
        input=json.dumps([path for path, _ in rows]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    wrong = {}
    for path, arguments in rows:
        answer = answers[path]
        if isinstance(answer, str):
            wrong[path] = [answer]
        elif arguments and (found := differences(arguments, answer)):
            wrong[path] = found
    assert wrong == {}


def test_the_comparison_sees_what_differs() -> None:
    def changed(tensor: Any, name: Any = "x", *, op: Any = None) -> None: ...

    ours = [
        [p.name, "" if p.default is inspect.Parameter.empty else repr(p.default), str(p.kind)]
        for p in inspect.signature(changed).parameters.values()
    ]
    assert differences([("tensor", ""), ("name", "None"), ("op", "None")], ours) == [
        "arguments are ['tensor', 'name']",
        "name='x'",
    ]


@pytest.mark.parametrize("name", ["torch", "tensorflow", "keras"])
def test_what_a_namespace_lists_is_there_once_and_sorted(name: str) -> None:
    if find_spec(NEEDS.get(name, name)) is None:
        pytest.skip(f"needs {name}")
    code = f"import hvd_cluster.{name} as hvd; [getattr(hvd, n) for n in hvd.__all__]; print(*hvd.__all__)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert names == sorted(set(names))
