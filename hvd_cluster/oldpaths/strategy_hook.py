"""``Trainer(strategy="horovod")`` without :mod:`hvd_cluster.lightning`.

The program need not import it. Lightning 1 had a strategy of this name. An import hook adds ours to the registry of
Lightning 2 when the program imports Lightning; the hook itself imports neither Lightning nor torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "horovod"
#: The modules that contain the registry, one for each distribution of Lightning.
_REGISTRIES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


class StrategyHook(MetaPathFinder):
    """Registers the name when a registry's module has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a registry's module, with the registration added.

        The other finders give the spec.
        """
        if fullname not in _REGISTRIES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                _execute(module)
                _register(module)

            # Patch the loader instead of replacing it: resources and sources are read through it.
            vars(spec.loader)["exec_module"] = exec_module
        return spec


def register_strategy() -> None:
    """Register the name now if Lightning is imported, or else when it is.

    Further calls have no effect.
    """
    if not any(isinstance(finder, StrategyHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, StrategyHook())
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])


def _register(strategies: ModuleType) -> None:
    registry = getattr(strategies, "StrategyRegistry", None)
    # Lightning 1 has a strategy of this name.
    if registry is not None and _NAME not in registry:
        # Lightning 1 multiplied the learning rate by the number of workers.
        registry.register(_NAME, _strategy, description="hvd_cluster.lightning.HorovodStrategy", scale_lr=True)


def _strategy(**options: Any) -> Any:
    return importlib.import_module("hvd_cluster.lightning").HorovodStrategy(**options)
