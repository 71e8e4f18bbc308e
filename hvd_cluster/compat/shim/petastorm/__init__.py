"""On PYTHONPATH, this package answers `import petastorm` in a process that has not imported hvd_cluster.compat."""

import hvd_cluster.compat  # noqa: F401  (from here on its finder comes last)
from hvd_cluster.oldpaths.stand_in import stand_in

stand_in(__name__)
