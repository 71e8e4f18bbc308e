"""Which distribution of Lightning 2 the program uses.

There are two, each with its own copy of the classes.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from hvd_cluster.errors import MissingExtraError

#: The module that has ``Trainer``, by the package to look for.
_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def lightning() -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``.

    It is the imported one, or else the installed one. A Trainer of one distribution does not accept modules and
    strategies of the other.

    Raises:
        MissingExtraError: neither is installed.
        ImportError: it is older than Lightning 2.
    """
    imported = [module for module in _PACKAGES.values() if module in sys.modules]
    installed = [module for package, module in _PACKAGES.items() if find_spec(package) is not None]
    if not installed:
        raise MissingExtraError("lightning", "lightning", "by hvd_cluster.lightning")
    found = importlib.import_module((imported or installed)[0])
    if int(found.__version__.partition(".")[0]) < 2:
        raise ImportError(
            f"{found.__name__} is version {found.__version__}, and HorovodStrategy needs 2.2 or newer: "
            "pip install -U lightning"
        )
    return found


def submodule(name: str) -> Any:
    """A module of that distribution, by its path below ``lightning.pytorch``.

    Or ``fabric`` and its path there.
    """
    package = lightning().__name__
    if name.partition(".")[0] != "fabric":
        return importlib.import_module(f"{package}.{name}")
    inside = name.partition(".")[2]
    fabric = "lightning.fabric" if package == "lightning.pytorch" else "lightning_fabric"
    return importlib.import_module(f"{fabric}.{inside}")
