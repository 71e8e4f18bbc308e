"""What a package of the shim folder does when it is imported in a process that has not imported hvd_cluster.compat."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from hvd_cluster.oldpaths.finder import OldPathFinder, shim_folder


def stand_in(name: str) -> None:
    """Put the real package ``name``, where it is installed, or else ours, in the place of the shim.

    PYTHONPATH comes before site-packages, so the real one has to be looked for behind the shim.
    """
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry != shim_folder()])
    # The import system returns what stands in sys.modules in the end.
    del sys.modules[name]
    if spec is None or spec.loader is None:
        # The finder of ours by itself: a search of sys.path would come back to the shim.
        spec = OldPathFinder(name).find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
