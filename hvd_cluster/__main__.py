"""``python -m hvd_cluster`` is ``hvdrun``."""

import sys

from hvd_cluster.launch.cli.main import main

sys.exit(main())
