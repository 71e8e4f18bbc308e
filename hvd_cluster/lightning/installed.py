"""Which distribution of Lightning 2 the program uses: there are two, with the same classes twice."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from hvd_cluster.errors import MissingExtraError

#: The module with ``Trainer`` in it, by the name of its distribution.
_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def lightning() -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``: the one that is imported already, else the one that is there.

    A Trainer of one of them takes no module and no strategy of the other.

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
    """A module of that distribution, named as below ``lightning.pytorch``, or from ``fabric`` on."""
    package = lightning().__name__
    if name.partition(".")[0] != "fabric":
        return importlib.import_module(f"{package}.{name}")
    inside = name.partition(".")[2]
    fabric = "lightning.fabric" if package == "lightning.pytorch" else "lightning_fabric"
    return importlib.import_module(f"{fabric}.{inside}")
