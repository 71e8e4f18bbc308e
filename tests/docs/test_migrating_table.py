"""The guide for migrating lists every old path and every name, as the table that serves them has it.

When the table has changed: ``python tests/docs/test_migrating_table.py`` writes the guide's anew.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from hvd_cluster.oldpaths.table import TABLE, Row

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
HEAD = "| `horovod.` | now |\n|---|---|\n"


def expected(table: Mapping[str, Row]) -> str:
    return HEAD + "".join(f"| `{path or '(itself)'}` | {served(row)} |\n" for path, row in table.items())


def served(row: Row) -> str:
    """Where a row's names live, in words."""
    parts = [f"`{row.module}`"] if row.module else []
    pairs = [(target.partition(":")[0], name, target.partition(":")[2]) for name, target in row.names.items()]
    for module, named in itertools.groupby(pairs, key=lambda pair: pair[0]):
        names = ", ".join(f"`{old}`" if old == new else f"`{old}` (as `{new}`)" for _, old, new in named)
        parts.append(f"{names} in `{module}`")
    return "; ".join(parts)


def test_the_guide_has_the_whole_table() -> None:
    assert expected(TABLE) in PAGE.read_text(), "run python tests/docs/test_migrating_table.py"


if __name__ == "__main__":
    page = PAGE.read_text()
    old = re.search(re.escape(HEAD) + r"(?:\|.*\n)+", page)
    assert old is not None
    PAGE.write_text(page.replace(old[0], expected(TABLE)))
