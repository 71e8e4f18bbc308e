# ruff: noqa: INP001 - its folder is an entry of sys.path, not a package
"""Python imports this when a worker, or a child process of one, starts: its folder is on their PYTHONPATH.

It lets programs use ``Trainer(strategy="horovod")`` that import nothing of ours. Other Pythons than the launcher's may
read it too, so it needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


class _LightningWatch:
    """Imports hvd_cluster, and with it the hook for Lightning's registry, when the program imports Lightning."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG004
        if fullname in ("lightning", "pytorch_lightning"):
            with contextlib.suppress(ImportError):  # a Python in which it is not installed
                import hvd_cluster  # noqa: F401


def _run_the_next() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    entries = [Path(entry).resolve() for entry in sys.path]
    here = Path(__file__).resolve().parent
    # Only what comes behind, or two copies of this file would run each other without end.
    behind = sys.path[entries.index(here) + 1 :] if here in entries else []
    spec = PathFinder.find_spec(__name__, behind)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])


sys.meta_path.insert(0, _LightningWatch)
_run_the_next()
