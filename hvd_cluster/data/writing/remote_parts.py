"""Data that lies in parts on other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

#: Writes one part, given its number and its batches; what it came to, as plain data. It can be pickled.
OnPart = Callable[[int, Iterator[Any]], dict[str, Any]]


@dataclass(frozen=True)
class RemoteParts:
    """Data that lies in parts on other machines, where functions can be run over each."""

    #: ``pyarrow.Schema`` of the parts; types of single parts may differ from it.
    schema: Any
    #: Runs a function over every part, where that lies; its answers, in any order.
    each: Callable[[OnPart], list[dict[str, Any]]]
