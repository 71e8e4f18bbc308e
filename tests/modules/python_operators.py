"""What Python gives for each operator of a filter: the truth that statistics and rows are checked against.

Not the product's own table, with which a wrong entry would be checked against itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

PYTHON_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, choices: value in choices,
    "not in": lambda value, choices: value not in choices,
}
