"""On PYTHONPATH, this package answers `import petastorm` in a process that has not imported hvd_cluster.compat.

PYTHONPATH comes before site-packages, so the real petastorm, where it is installed, has to be looked for behind this.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import hvd_cluster.compat  # noqa: F401  (from here on its finder comes last)

_shim = str(Path(__file__).parents[1])
_real = PathFinder.find_spec(__name__, [entry for entry in sys.path if entry != _shim])
# The import system returns what stands in sys.modules in the end.
del sys.modules[__name__]
if _real is not None and _real.loader is not None:
    sys.modules[__name__] = module_from_spec(_real)
    _real.loader.exec_module(sys.modules[__name__])
else:
    # The finder of ours by itself: a search of sys.path would come back to this file.
    from hvd_cluster.oldpaths.finder import OldPathFinder

    _spec = OldPathFinder(__name__).find_spec(__name__)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
