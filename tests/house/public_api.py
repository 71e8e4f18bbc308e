"""Prints the public names of hvd_cluster and how each is called.

After a change that is meant: ``python tests/house/public_api.py > tests/house/public_api.txt``.

A line for each function, class, method and property that a user can reach from ``__all__`` of a public module.
Annotations are left out: they name internal classes, and mypy checks them.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

#: Modules whose ``__all__`` is public. mxnet's needs mxnet, which does not install beside the others.
MODULES = [
    "hvd_cluster",
    "hvd_cluster.errors",
    *("hvd_cluster.torch", "hvd_cluster.torch.elastic"),
    *("hvd_cluster.tensorflow", "hvd_cluster.tensorflow.elastic"),
    *("hvd_cluster.keras", "hvd_cluster.keras.callbacks", "hvd_cluster.keras.elastic"),
    "hvd_cluster.lightning",
    *("hvd_cluster.spark", "hvd_cluster.spark.conf"),
    *("hvd_cluster.ray", "hvd_cluster.ray.train", "hvd_cluster.ray.ray_logger"),
    *("hvd_cluster.data", "hvd_cluster.data.loaders"),
    *("hvd_cluster.petastorm", "hvd_cluster.petastorm.converter"),
    "hvd_cluster.estimators",
]


def public_names(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
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
    for name in MODULES:
        module = importlib.import_module(name)
        print(f"\n[{name}]")
        for each in public_names(module):
            for line in lines_of(each, getattr(module, each)):
                print(line)


if __name__ == "__main__":
    sys.exit(main())
