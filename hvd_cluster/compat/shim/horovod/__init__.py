"""On PYTHONPATH, this package answers `import horovod` in a process that has not imported hvd_cluster.compat."""

import importlib
import sys

import hvd_cluster.compat  # noqa: F401  (from here on its finder comes first)

# Give way to the module that compat serves: the import system returns what stands in sys.modules in the end.
del sys.modules[__name__]
importlib.import_module(__name__)
