"""On PYTHONPATH, this package serves `import petastorm`.

It does so in processes that have not imported hvd_cluster.compat.
"""

import hvd_cluster.compat  # noqa: F401  (from here on its finder comes last)
from hvd_cluster.oldpaths.shim import replace_shim

replace_shim(__name__)
