"""Prints the public names of hvd_cluster and how each is called.

After a change that is meant: ``python tests/house/public_api.py > tests/house/public_api.txt``.

A line for each function, class, method and property that docs/api shows, and for each variable of the settings.
Annotations are left out: they name internal classes, and mypy checks them.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hvd_cluster.settings import Settings

ROOT = Path(__file__).parents[2]
#: A module or a name that the reference shows, and the names that it shows of a module if not all.
SHOWN = re.compile(r"^::: (hvd_cluster[.\w]*)(?:\n    options: \{members: (?:\[(.*)\]|false)\})?$", re.MULTILINE)


def documented() -> dict[str, list[str] | None]:
    """The modules of the reference, with their public names; None for all that they define.

    mxnet's are left out: they need mxnet, which does not install beside the others.
    """
    found: dict[str, list[str] | None] = {"hvd_cluster": ["__version__"]}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for shown in SHOWN.finditer(page.read_text()):
            path, members = shown[1], shown[2]
            if (ROOT / path.replace(".", "/")).exists() or (ROOT / f"{path.replace('.', '/')}.py").exists():
                found[path] = members.split(", ") if members else None
            else:
                module, _, name = path.rpartition(".")
                found[module] = [*(found.get(module) or []), name]
    return {module: names for module, names in sorted(found.items()) if module != "hvd_cluster.mxnet"}


def public_names(module: Any, names: list[str] | None) -> list[str]:
    if names is not None or hasattr(module, "__all__"):
        return sorted(names or module.__all__)
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ or (name.isupper() and isinstance(value, (str, tuple)))
    ]
    return sorted(name for name in own if not name.startswith("_"))


def call(value: Any) -> str:
    """The arguments of a function: names, defaults and kinds."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    # A default by its own name: where its class lives is ours to change.
    return re.sub(r"<(?:class |function )?'?[\w.]*?(\w+)'?(?: object)?(?: at 0x[0-9a-f]+)?>", r"\1", text)


def lines_of(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {path}{call(value)}"
        for name in sorted(dir(value)):
            # What a class inherits from another library is that library's.
            home = next((vars(base)[name] for base in value.__mro__ if name in vars(base) and is_ours(base)), None)
            if home is None or name.startswith("_"):
                continue
            member = getattr(home, "__func__", home)
            yield f"{path}.{name}{call(member)}" if callable(member) else f"{path}.{name}"
    elif callable(value):
        yield f"{path}{call(value)}"
    else:
        yield path


def is_ours(base: type) -> bool:
    return base.__module__.partition(".")[0] == "hvd_cluster"


def main() -> None:
    for name, names in documented().items():
        module = importlib.import_module(name)
        print(f"\n[{name}]")
        for each in public_names(module, names):
            for line in lines_of(each, getattr(module, each)):
                print(line)
    print("\n[hvd_cluster.settings]")
    for knob in fields(Settings):
        print(f"{knob.metadata['env']}={knob.default!r}")


if __name__ == "__main__":
    sys.exit(main())
