# ruff: noqa: INP001 - its folder is an entry of sys.path, not a package
"""Python imports this module when a worker, or a child of one, starts.

It makes ``Trainer(strategy="horovod")`` work in programs that do not import hvd_cluster, and has the process write its
stack when the launcher asks for it. Other Pythons than the launcher's may import it too, so it uses only the standard
library.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


class _LightningWatch:
    """Imports hvd_cluster when the program imports Lightning.

    That registers the strategy.
    """

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG004
        if fullname in ("lightning", "pytorch_lightning"):
            with contextlib.suppress(ImportError):  # hvd_cluster is not installed in this Python
                import hvd_cluster  # noqa: F401


def _run_the_next() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    entries = [Path(entry).resolve() for entry in sys.path]
    here = Path(__file__).resolve().parent
    # Only later entries, or two copies of this file would run each other endlessly.
    behind = sys.path[entries.index(here) + 1 :] if here in entries else []
    spec = PathFinder.find_spec(__name__, behind)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])


# The signal is hvd_cluster.launch.child.STACK_SIGNAL.
with contextlib.suppress(AttributeError, RuntimeError):  # another interpreter, or one without a standard error
    faulthandler.register(signal.SIGRTMIN + 9, all_threads=False)
sys.meta_path.insert(0, _LightningWatch)
_run_the_next()
