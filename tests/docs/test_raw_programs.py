"""The programs of docs/raw-columns.md are those of examples/raw_columns, which the slow tests run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [path for path in sorted((ROOT / "examples" / "raw_columns").glob("*.py")) if path.stem != "data"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_short_and_is_in_the_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # Without imports: what they take, one a line and sorted, says nothing about how much a user has to write.
    statements = [one for one in ast.parse(text).body[1:] if not isinstance(one, (ast.Import, ast.ImportFrom))]
    lines = {line for one in statements for line in range(one.lineno, (one.end_lineno or 0) + 1)}
    assert len(lines) <= 15
    page = (ROOT / "docs" / "raw-columns.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python run=\"no: [^\"]*\"\n(.*?)```", page, re.DOTALL)
    assert text.partition('"""\n\n')[2] in blocks
