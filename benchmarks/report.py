"""Tables of a benchmark that compares more than two contenders, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Report:
    """What one module found."""

    title: str
    #: Names of the columns.
    columns: Sequence[str]
    #: One cell for each column.
    rows: Sequence[Sequence[str]]
    #: What to know beside the table.
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table of this run for benchmarks/README.md."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"


class Part(Protocol):
    """What stands in benchmarks/README.md: a :class:`Report`, or :class:`benchmarks.measure.Table`."""

    def markdown(self) -> str: ...


@dataclass(frozen=True)
class Reports:
    """Several tables of one module."""

    parts: Sequence[Part]

    def markdown(self) -> str:
        """The tables, one below the other."""
        return "\n".join(part.markdown() for part in self.parts)
