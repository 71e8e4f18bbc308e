"""benchmarks/README.md: a section for each benchmark, with the day and the machine that it was measured on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HEAD = """# Benchmarks

Ours and the peer take turns in one run; medians, and the ratio peer / ours. `make bench` writes this page. A load above
0.5 before the run means that others were using the machine: run it again.
"""
_MARK = re.compile(r"^<!-- (\w+) -->\n", re.MULTILINE)


def section(name: str, tables: str, doc: str, conditions: str) -> str:
    """What one benchmark has to say.

    Args:
        name: the module's.
        tables: what it found, in Markdown.
        doc: the module's docstring.
        conditions: where and when it was measured.
    """
    return f"{tables.strip()}\n\n`benchmarks/{name}.py`: {doc.strip()}\n\nMeasured {conditions}\n"


def sections(page: str) -> dict[str, str]:
    """The sections of a page, by the names of their modules."""
    _, *parts = _MARK.split(page)
    return {name: f"{text.strip()}\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def page(found: Mapping[str, str], order: Sequence[str]) -> str:
    """The page with these sections, those of them that are in ``order``."""
    parts = [f"<!-- {name} -->\n{found[name]}" for name in order if name in found]
    return "\n".join([HEAD, *parts])
