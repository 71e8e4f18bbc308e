"""How a launcher hands the answer for ``horovod`` on to its workers and to their child processes.

A worker unpickles ``horovod.torch.allreduce`` before any line of the user's script runs, and a script's own children
start with nothing but the environment. So a folder that holds a package ``horovod`` goes onto PYTHONPATH; importing it
does what ``import hvd_cluster.compat`` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvd_cluster.oldpaths.finder import serves, shim_folder


def carries() -> bool:
    """Whether this process answers for ``horovod``, so that its workers must too."""
    return serves("horovod")


def carry(environ: Mapping[str, str], *, wanted: bool | None = None) -> dict[str, str]:
    """The variables to add to a worker's environment.

    Args:
        environ: the environment that the worker would get otherwise.
        wanted: whether to answer for ``horovod`` there; None does as this process does. A launcher whose workers start
            on other machines passes ``carries()`` along and calls this there, where the folder is.
    """
    if not (carries() if wanted is None else wanted):
        return {}
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != shim_folder()]
    return {"PYTHONPATH": os.pathsep.join([shim_folder(), *others])}
