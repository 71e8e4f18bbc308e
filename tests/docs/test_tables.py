"""What the guides' tables quote is there: messages of troubleshooting in the sources, benchmarks in ``make bench``."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES

ROOT = Path(__file__).parents[2]
#: Stands for a value that the program puts into a text.
VALUE = "\0"


def first_column(page: str) -> list[str]:
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [line.split(" | ")[0] for line in lines if line.startswith("| ")]


def messages() -> list[str]:
    """Quoted texts of more than one word."""
    quoted = re.findall(r"`([^`]+)`", "\n".join(first_column("troubleshooting.md")))
    return [text for text in quoted if text.count(" ") >= 2]


def literal(node: ast.AST) -> str:
    """A text of the program; adjacent literals are one node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    return ""


@functools.cache
def texts() -> str:
    files = (ROOT / "hvd_cluster").rglob("*.py")
    return "\n".join(filter(None, (literal(node) for file in files for node in ast.walk(ast.parse(file.read_text())))))


def pattern(message: str) -> str:
    """Numbers and capitals of a message are examples of values; dots stand for anything."""
    parts = (re.escape(part) for part in re.split(r" ?\.\.\. ?", message))
    return re.sub(r"\d+|[A-Z]{3,}", lambda value: f"(?:{value[0]}|{VALUE}|%[sd])", "[^\n]*".join(parts))


@pytest.mark.long
@pytest.mark.parametrize("message", messages())
def test_a_message_of_troubleshooting_is_one_of_ours(message: str) -> None:
    assert re.search(pattern(message), texts(), re.IGNORECASE), (
        f"docs/troubleshooting.md quotes a text that is not in hvd_cluster/: {message!r}. "
        "Numbers and words in capitals may differ; write ' ... ' for each other part that the program puts in"
    )


def test_the_page_on_benchmarks_lists_what_make_bench_runs() -> None:
    listed = [name for cell in first_column("benchmarks.md") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(NAMES)


def test_a_page_that_the_site_completes_says_where_to_read_on_in_the_checkout() -> None:
    completed = re.compile(r"^(?:::: |<!-- (?:params|settings|notebook)\b)", re.MULTILINE)
    pages = {page: page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    pages = {page: text for page, text in pages.items() if completed.search(text)}
    assert len(pages) > 10
    assert [page.name for page, text in pages.items() if " <!-- checkout -->\n" not in text] == []
