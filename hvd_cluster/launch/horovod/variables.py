"""``horovod.runner.common.util.env``: rank and size from the environment.

They are those of this process.
"""

from __future__ import annotations

import re

from hvd_cluster.topology import Topology, inherited_env

#: The launchers' variables for rank and size; a program may have set only these two.
_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)
_NOT_EXPORTABLE = re.compile(r"BASH_FUNC.*|OLDPWD")


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size from the launcher's variables; 0 and 1 without a launcher.

    The launcher is ours, torchrun, MPI or Slurm.

    Raises:
        ValueError: the variables are not numbers, or contradict each other.
    """
    environ = inherited_env()
    for rank, size in _PAIRS:
        if environ.get(rank) and environ.get(size):
            return int(environ[rank]), int(environ[size])
    found = Topology.from_env()
    return found.rank, found.size


def is_exportable(variable: str) -> bool:
    """Whether a launcher passes the variable on to workers."""
    return _NOT_EXPORTABLE.fullmatch(variable) is None
