"""Horovod's promise on today's stack: one function, every GPU of a cluster.

A training function, on a Spark or Ray cluster.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvd_cluster.oldpaths.finder import serve as _serve
from hvd_cluster.oldpaths.strategy_hook import register_strategy as _register_strategy
from hvd_cluster.version import __version__

if TYPE_CHECKING:
    from hvd_cluster.launch.function import run as run

__all__ = ["__version__", "run"]

#: Names that are imported on first use, so that `import hvd_cluster` stays light.
_LAZY = {"run": "hvd_cluster.launch.function"}
#: Packages that are imported on first use: ``hvd_cluster.spark.run`` works after ``import hvd_cluster``.
_PACKAGES = (
    *("data", "elastic", "estimators", "keras", "lightning", "mxnet", "petastorm", "ray", "spark", "tensorflow"),
    "torch",
)

# Old paths below `hvd_cluster` (`hvd_cluster.spark.torch`); real files come first.
_serve("hvd_cluster", first=False)
# `Trainer(strategy="horovod")` works without importing hvd_cluster.lightning.
_register_strategy()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_PACKAGES})
