"""Adapts the guides, which are written for readers of the checkout and for tests, to HTML.

Links to files outside of docs/ become text. The info strings of code blocks, which say how
tests/docs/test_code_blocks.py runs them, become titles if they name a file. Blocks in comments, which are only for the
tests, are omitted. The tables of params in the reference are generated from the rows that define the params.
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
        FileNotFoundError: a linked file does not exist.
    """
    folder = Path(page.file.abs_src_path).parent
    docs = Path(config["docs_dir"]).resolve()

    def as_text(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {match[2]}, which does not exist")
        return match[1]

    def titled(match: re.Match[str]) -> str:
        file = re.search(r'file="([^"]+)"', match[2])
        return f'```{match[1]} title="{file[1]}"' if file else f"```{match[1]}"

    return _INFO.sub(titled, _LINK.sub(as_text, _PARAMS.sub(_table, _HIDDEN.sub("", markdown))))


def _table(match: re.Match[str]) -> str:
    """The rows of a table of params, in Markdown."""
    lines = ["| param | default | meaning | other spellings |", "|---|---|---|---|"]
    for row in getattr(importlib.import_module(match[1]), match[2]):
        names = [row.alias] if row.alias else []
        names += [f"set{name}" for name in row.setters or row.accessors]
        names += [f"get{name}" for name in row.accessors]
        spellings = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| `{row.name}` | `{row.default!r}` | {row.doc.replace('<', '&lt;')} | {spellings} |")
    return "\n".join(lines)
