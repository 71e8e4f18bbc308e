"""The messages about values that no tensor can hold: nulls, and lists of unequal length."""

from __future__ import annotations


def nulls_text(name: str, count: int, where: str = "") -> str:
    """What to say about nulls in a column; ``where``: in which rows they were counted, if not in all."""
    return (
        f"column {name!r} holds {count} null{'s' if count != 1 else ''}{where}: fill them (df.fillna) or drop those "
        "rows (df.dropna)"
    )


def inner_nulls_text(name: str, count: int, where: str = "") -> str:
    """What to say about nulls inside the lists of a column."""
    return (
        f"column {name!r} holds {count} null{'s' if count != 1 else ''} inside its lists{where} (in pandas, NaN is "
        "one): put numbers in their places, or drop those rows"
    )


def ragged_text(name: str, one: int, other: int, where: str = "") -> str:
    """What to say about lists of unequal length in a column."""
    return f"column {name!r} holds lists of different lengths, {one} and {other}{where}: pad or cut them to one length"
