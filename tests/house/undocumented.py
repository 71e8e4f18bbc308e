"""Prints the arguments of public functions and classes that their docstrings do not name."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

from public_api import documented, is_ours, public_names

#: In the first line of a docstring, or in one about arguments: the others are those of the function or class it names.
REFERENCE = re.compile(r":(?:func|class|meth):`")
#: A field of a dataclass or a named tuple, below its comment.
FIELD = re.compile(r"#: .*\n +(\w+):")
#: ``*args`` and ``**kwargs``.
FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def arguments_left_out(value: Any) -> list[str]:
    """The arguments of a function or class of ours that its docstring does not name."""
    if inspect.isclass(value) and (not is_ours(value) or issubclass(value, BaseException)):
        return []  # errors are made by us, not by users
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return []
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        text += inspect.getdoc(value.__init__) or ""
        text += " ".join(FIELD.findall(inspect.getsource(value)))
    if any(REFERENCE.search(line) and (not at or "argument" in line) for at, line in enumerate(text.splitlines())):
        return []
    names = set(re.findall(r"\w+", text))
    try:
        parameters = [each for each in inspect.signature(value).parameters.values() if each.kind not in FREE]
    except ValueError:  # that of a built-in class
        return []
    return [each.name for each in parameters if each.name not in names]


def main() -> None:
    for name, names in documented().items():
        module = importlib.import_module(name)
        for each in public_names(module, names):
            if left_out := arguments_left_out(getattr(module, each)):
                print(f"{name}.{each}: {', '.join(left_out)}")


if __name__ == "__main__":
    sys.exit(main())
