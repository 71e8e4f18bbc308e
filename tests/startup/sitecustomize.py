"""Runs first in every Python process of the tests, by tests/plugins/light.py: imports of Keras cost half as much."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

#: What Keras and TensorFlow Lite try to import for features that no test uses: seconds in each process.
OPTIONAL = {"matplotlib", "sklearn"} | ({"jax"} if os.environ.get("KERAS_BACKEND") != "jax" else set())


class Finder:
    """Refuses OPTIONAL to these two, and to nothing else."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in OPTIONAL:
            frame = sys._getframe(1)
            while frame.f_globals.get("__name__", "").startswith("importlib") and frame.f_back is not None:
                frame = frame.f_back
            if frame.f_globals.get("__name__", "").startswith(("keras.", "tensorflow.lite.")):
                raise ModuleNotFoundError(f"{name} is not imported by Keras in tests (tests/startup)", name=name)


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]

# Then the one that Python would have found without this one: hvd_cluster's own, in workers.
HERE = str(Path(__file__).resolve().parent)
if HERE in sys.path:
    spec = PathFinder.find_spec("sitecustomize", sys.path[sys.path.index(HERE) + 1 :])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])
