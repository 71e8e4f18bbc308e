"""benchmarks/README.md is what ``make bench`` writes, and the modules that it and the guide name are there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.page import page, section, sections

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
#: What a launcher puts before a line of a worker, the dates and levels of logs, a traceback.
LOG = re.compile(
    r"\[\d+\]<std|\d\d/\d\d/\d\d \d\d:|\d{4}-\d\d-\d\d \d\d:|(?:WARN(?:ING)?|INFO|ERROR|[IWE]\d{4})\b"
    r"|Traceback|Using Spark|Setting default|To adjust"
)


def described(name: str) -> str:
    """What the page says below the tables of a module."""
    docstring = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text()), clean=False)
    assert docstring is not None
    return f"\n`benchmarks/{name}.py`: {docstring.strip()}\n"


def test_a_benchmark_that_is_measured_again_replaces_its_own_section_and_no_other() -> None:
    old = {"b": section("b", "table b", "Of b.", "then."), "a": section("a", "table a", "Of a.", "then.")}
    text = page(old, ["a", "b", "c"])
    assert text.index("table a") < text.index("table b")
    assert sections(text) == old
    new = {"b": section("b", "table b2", "Of b.", "now."), "c": section("c", "table c", "Of c.", "now.")}
    assert page(sections(text) | new, ["a", "b", "c"]) == page({**new, "a": old["a"]}, ["a", "b", "c"])


def test_every_section_of_the_page_says_where_and_when_it_was_measured() -> None:
    found = sections(PAGE)
    assert list(found) == NAMES
    assert page(found, NAMES) == PAGE
    assert [name for name, text in found.items() if not re.search(r"^Measured 20\d\d-\d\d-\d\d; ", text, re.M)] == []


def test_the_page_says_of_each_module_what_its_docstring_says() -> None:
    assert re.findall(r"^`benchmarks/(\w+)\.py`: ", PAGE, re.MULTILINE) == NAMES
    assert [name for name in NAMES if described(name) not in PAGE] == []


def test_the_page_holds_no_line_of_a_log() -> None:
    assert [line for line in PAGE.splitlines() if LOG.match(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "[0]<stderr>:WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "26/11/21 02:35:01 WARN NativeCodeLoader: Unable to load native-hadoop library",
        "WARNING: Using incubator modules: jdk.incubator.vector",
        'Setting default log level to "WARN".',
    ],
)
def test_a_line_of_a_log_is_known(line: str) -> None:
    assert LOG.match(line)


def test_the_guide_names_every_module() -> None:
    table = (ROOT / "docs" / "benchmarks.md").read_text().partition("| module |")[2].partition("\n\n")[0]
    first_column = "".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert sorted(re.findall(r"`(\w+)`", first_column)) == sorted(NAMES)


def test_a_name_that_is_not_a_benchmark_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "hosts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no benchmark 'hosts'" in done.stderr
    assert "Traceback" not in done.stderr
