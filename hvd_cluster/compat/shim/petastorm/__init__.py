"""On PYTHONPATH, this package serves `import petastorm`.

In a process that has not imported hvd_cluster.compat.
"""

import hvd_cluster.compat  # noqa: F401  (from here on its finder comes last)
from hvd_cluster.oldpaths.shim import replace_shim

replace_shim(__name__)
