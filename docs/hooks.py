"""What the guides say to a reader of the checkout and to the tests, and not to a reader of the HTML.

Links to files of the checkout that are no pages become text, and the info strings of code blocks, which say how
tests/docs/test_code_blocks.py runs them, become titles where they name a file; blocks in comments, which are for the
tests alone, are left out. The reference's tables of params, which
no static reader finds, are written from the rows that the params are made from.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_HIDDEN = re.compile(r"^<!--\n```.*?^-->\n+", re.MULTILINE | re.DOTALL)
_INFO = re.compile(r"^```(\w+) ([^\n]+)$", re.MULTILINE)
_PARAMS = re.compile(r"^<!-- params: ([\w.]+)\.(\w+) -->$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for each page.

    Raises:
        FileNotFoundError: such a file is not there.
    """
    folder = Path(page.file.abs_src_path).parent
    docs = Path(config["docs_dir"]).resolve()

    def as_text(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {match[2]}, which is not there")
        return match[1]

    def titled(match: re.Match[str]) -> str:
        file = re.search(r'file="([^"]+)"', match[2])
        return f'```{match[1]} title="{file[1]}"' if file else f"```{match[1]}"

    return _INFO.sub(titled, _LINK.sub(as_text, _PARAMS.sub(_table, _HIDDEN.sub("", markdown))))


def _table(match: re.Match[str]) -> str:
    """The rows of a table of params, in Markdown."""
    lines = ["| param | default | meaning | other spellings |", "|---|---|---|---|"]
    for row in getattr(importlib.import_module(match[1]), match[2]):
        accessors = [*(f"set{name}" for name in row.setters), *(f"get{name}" for name in row.getters)]
        spellings = ", ".join(f"`{name}`" for name in (*row.aliases, *accessors))
        lines.append(f"| `{row.name}` | `{row.default!r}` | {row.doc.replace('<', '&lt;')} | {spellings} |")
    return "\n".join(lines)
