"""On PYTHONPATH, this package serves `import horovod`.

It does so in processes that have not imported hvd_cluster.compat.
"""

import importlib
import sys

import hvd_cluster.compat  # noqa: F401  (from here on its finder comes first)

# Replace this module by the one that compat serves: the import system returns the entry of sys.modules.
del sys.modules[__name__]
importlib.import_module(__name__)
