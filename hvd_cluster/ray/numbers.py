"""Are arguments the numbers that they have to be? What is wrong comes as texts, to be told all at once. Pure."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def wrong_whole(name: str, value: Any) -> list[str]:
    """Unless it is a whole number of at least 1, or None: what it is instead."""
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, Integral):
        return [f"{name}={value!r} must be a whole number"]
    return [] if int(value) >= 1 else [f"{name}={value} must be >= 1"]


def wrong_amount(name: str, value: Any, more: str = "") -> list[str]:
    """Unless it is a finite number of at least 0: what it is instead."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return [f"{name}={value!r} must be a number{more}"]
    return [] if float(value) >= 0 else [f"{name}={value} must be >= 0"]


def wrong_flag(name: str, value: Any) -> list[str]:
    """Unless it is True or False: what it is instead."""
    return [] if value in (True, False) else [f"{name}={value!r} must be True or False"]
