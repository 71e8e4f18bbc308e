"""The public names of hvd_cluster, and how each is called, are those of the record; docstrings name the arguments."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_public_names_and_signatures_are_those_of_the_record() -> None:
    record, found = (HERE / "public_api.txt").read_text(), printed("public_api.py")
    text = "\n".join(changes(record, found)) or "lines were repeated, or are in another order"
    assert found.splitlines() == record.splitlines(), (
        f"{text}\nIf the change is meant: describe it in its docstring, docs/ and CHANGELOG.md, then "
        "python tests/house/public_api.py > tests/house/public_api.txt"
    )


def test_the_record_has_what_the_reference_shows() -> None:
    record = entries((HERE / "public_api.txt").read_text())
    pages = [page for page in (HERE.parents[1] / "docs" / "api").glob("*.md") if page.name != "mxnet.md"]
    shown = [path for page in pages for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]
    modules = {name.rpartition(".")[0] for name in record}
    assert len(shown) > 40
    assert [path for path in shown if path not in record and path not in modules] == []


def test_docstrings_name_each_argument() -> None:
    left_out = printed("undocumented.py")
    assert not left_out, (
        f"{left_out}\nName them in an Args section, or begin with the function that has the same, as :func:`name`"
    )


def changes(recorded: str, found: str) -> Iterator[str]:
    """A line for each entry that is new or gone, and for each whose arguments changed: those alone, not all of them."""
    before, after = entries(recorded), entries(found)
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"- {name}"
        elif name not in before:
            yield f"+ {name}: {' '.join(after[name])}"
        elif before[name] != after[name]:
            tokens = difflib.ndiff(before[name], after[name])
            yield f"  {name}: {'   '.join(token for token in tokens if token[0] in '+-')}"


def entries(text: str) -> dict[str, list[str]]:
    """The parts of each line of a record, by its module and name: a change of any part is a change of the line."""
    found, module = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            module = line.strip("[]")
        elif line:
            name, bracket, arguments = line.partition("(")
            parts = [part for part in (name, bracket, *arguments.removesuffix(")").split(", ")) if part]
            found[f"{module}.{name.removeprefix('class ')}"] = parts
    return found


def test_a_changed_argument_is_shown_alone() -> None:
    recorded = "[m]\nrun(func, args=(), np=None, *, env=None)\ngone()\nsize()\nclass Same(a)\n"
    found = "[m]\nrun(func, args=(), *, env=None, slots=1)\nnew(a, b)\nsize\nclass Same(a)\n"
    assert list(changes(recorded, found)) == [
        "- m.gone",
        "+ m.new: new ( a b",
        "  m.run: - np=None   + slots=1",
        "  m.size: - (",
    ]


def printed(program: str) -> str:
    """What a program of this folder prints about all public modules."""
    missing = [name for name in ("tensorflow", "keras", "lightning", "pyspark", "ray") if not find_spec(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    run = subprocess.run([sys.executable, HERE / program], capture_output=True, text=True, check=False, timeout=110)
    assert run.returncode == 0, run.stderr
    return run.stdout
