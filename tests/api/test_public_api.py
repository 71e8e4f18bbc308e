"""Horovod's public names and arguments, as recorded, answer at their old paths: same order, same defaults."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("horovod-0.28.1.txt")
#: What a namespace needs to be imported.
NEEDS = {"tensorflow": "tensorflow", "keras": "keras", "spark": "pyspark", "ray": "ray", "mxnet": "mxnet"}
NEEDS |= {"_keras": "keras", "compute_service": "tensorflow", "sparkdl": "pyspark"}

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
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return None
    parameters = parameters[1:] if parameters and parameters[0].name == "self" else parameters
    return [
        [p.name, "" if p.default is inspect.Parameter.empty else repr(p.default), p.kind.name] for p in parameters
    ]

answers = {}
for path in json.load(sys.stdin):
    try:
        answers[path] = arguments_of(path)
    except Exception as error:
        answers[path] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Arguments:
    """What a call may give: names with the source of their defaults, "" where there is none."""

    positional: list[tuple[str, str]]
    keyword_only: list[tuple[str, str]]

    @classmethod
    def parse(cls, text: str) -> Arguments:
        """The arguments of ``(a, b=1, *, c=None)``."""
        function = ast.parse(f"def f{text}: pass").body[0]
        assert isinstance(function, ast.FunctionDef)
        given = function.args
        defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
        sources = [[ast.unparse(each) if each else "" for each in part] for part in (defaults, given.kw_defaults)]
        names = [[each.arg for each in part] for part in (given.args, given.kwonlyargs)]
        return cls(*(list(zip(n, s, strict=True)) for n, s in zip(names, sources, strict=True)))


def recorded() -> Iterator[tuple[str, Arguments | None]]:
    """Each old path, with its arguments; None where only the name is recorded."""
    prefixes = [""]
    for line in RECORD.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            prefixes = [f"horovod.{name.strip()}." for name in line.strip("[]").split(",")]
            continue
        name, bracket, rest = line.partition("(")
        arguments = Arguments.parse(bracket + rest) if bracket else None
        for prefix in prefixes:
            for each in name.split() or [""]:
                yield f"{prefix}{each}".removesuffix("."), arguments


def differences(expected: Arguments, ours: list[list[str]] | None) -> list[str]:
    """What a call in Horovod's spelling would stumble over."""
    if ours is None:
        return ["it has no signature"]
    positional = [name for name, _, kind in ours if kind in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    by_name = {name: default for name, default, kind in ours if not kind.startswith("VAR")}
    found = []
    names = [name for name, _ in expected.positional]
    if positional[: len(names)] != names:
        found.append(f"arguments are {positional[: len(names)]}")
    recorded_defaults = dict(expected.positional + expected.keyword_only)
    for name, default in recorded_defaults.items():
        if name not in by_name:
            found.append(f"there is no {name}")
        elif default and not by_name[name]:
            found.append(f"{name} is required")
        elif default not in ("", "...") and by_name[name] != default:
            found.append(f"{name}={by_name[name]}")
        # Where none is recorded, more may be left out here.
    further = [name for name, default in by_name.items() if not default and name not in recorded_defaults]
    return found + [f"{name} is required" for name in further]


def test_names_and_arguments_are_horovods() -> None:
    rows = [
        (path, arguments)
        for path, arguments in recorded()
        if all(find_spec(needed) for name, needed in NEEDS.items() if name in path.split("."))
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
    wrong = []
    for path, arguments in rows:
        answer = answers[path]
        if isinstance(answer, str):
            wrong.append(f"{path}: {answer}")
        elif arguments is not None:
            wrong += [f"{path}: {found}" for found in differences(arguments, answer)]
    assert wrong == []


def described(function: Callable[..., Any]) -> list[list[str]]:
    return [
        [p.name, "" if p.default is inspect.Parameter.empty else repr(p.default), p.kind.name]
        for p in inspect.signature(function).parameters.values()
    ]


def test_the_comparison_sees_what_differs() -> None:
    def changed(tensor: Any, name: Any = "x", *, op: Any, factor: Any = 2, **others: Any) -> None: ...

    assert differences(Arguments.parse("(tensor, name=None)"), described(changed)) == ["name='x'", "op is required"]
    assert differences(Arguments.parse("(tensor, name='x', op=...)"), described(changed)) == [
        "arguments are ['tensor', 'name']",
        "op is required",
    ]
    assert differences(Arguments.parse("(tensor, *, op, factor=1, others=None)"), described(changed)) == [
        "factor=2",
        "there is no others",
    ]
    assert differences(Arguments.parse("()"), described(changed)) == ["tensor is required", "op is required"]
    assert differences(Arguments.parse("(tensor, *, op, factor=...)"), described(changed)) == []
    assert differences(Arguments.parse("()"), None) == ["it has no signature"]


def test_what_a_namespace_lists_is_there_once_and_sorted() -> None:
    listed = [name for name in ("torch", "tensorflow", "keras") if find_spec(name) is not None]
    code = """
import importlib, json, sys
modules = {name: importlib.import_module(f"hvd_cluster.{name}") for name in sys.argv[1:]}
for module in modules.values():
    [getattr(module, name) for name in module.__all__]
print(json.dumps({name: list(module.__all__) for name, module in modules.items()}))
"""
    done = subprocess.run([sys.executable, "-c", code, *listed], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    assert names == {name: sorted(set(names[name])) for name in listed}


@pytest.mark.parametrize("package", ["", ".data", ".petastorm", ".estimators", ".ray", ".spark"])
def test_dir_of_a_package_has_its_public_names(package: str) -> None:
    found = importlib.import_module(f"hvd_cluster{package}")
    assert set(found.__all__) - set(dir(found)) == set()


def test_the_packages_need_no_import_of_their_own_and_cost_nothing_before() -> None:
    code = """
import sys, hvd_cluster
assert "hvd_cluster.spark" not in sys.modules
import hvd_cluster.data.materializing
from hvd_cluster.data import materialize
assert callable(materialize) and callable(hvd_cluster.spark.run) and callable(hvd_cluster.ray.run)
assert not hasattr(hvd_cluster, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
