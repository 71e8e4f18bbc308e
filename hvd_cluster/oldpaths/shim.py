"""The shim folder on PYTHONPATH, which serves old paths in child processes.

By it, workers and their child processes serve the same old paths as this process. A worker unpickles
``horovod.torch.allreduce`` before it runs any line of the user's script, and child processes of a script inherit only
the environment. The folder contains a package ``horovod``; importing it imports ``hvd_cluster.compat``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from hvd_cluster.oldpaths.finder import OldPathFinder, serves, shim_folder


def serves_horovod() -> bool:
    """Whether this process serves ``horovod``, so that its workers must too."""
    return serves("horovod")


def shim_env(environ: Mapping[str, str], *, wanted: bool | None = None) -> dict[str, str]:
    """The variables to add to a worker's environment.

    Args:
        environ: the worker's environment without them.
        wanted: whether the worker serves ``horovod``; None does as this process does. If workers start on other
            machines, the launcher sends ``serves_horovod()`` there and calls this function there, where the folder is.
    """
    if not (serves_horovod() if wanted is None else wanted):
        return {}
    others = other_entries(environ.get("PYTHONPATH", ""), shim_folder())
    return {"PYTHONPATH": os.pathsep.join([shim_folder(), *others])}


def other_entries(python_path: str, folder: str) -> list[str]:
    """The entries of a PYTHONPATH without ``folder``.

    An empty entry, as in ``:/x``, means the current directory.
    """
    return [entry for entry in python_path.split(os.pathsep) if entry != folder] if python_path else []


def replace_shim(name: str) -> None:
    """Replace an imported shim package by the real one, or else by ours.

    The real one is taken if it is installed. PYTHONPATH comes before site-packages, so the search for the real package
    must leave out the shim folder.
    """
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry != shim_folder()])
    # The import system returns what is in sys.modules in the end.
    del sys.modules[name]
    if spec is None or spec.loader is None:
        # Ask our finder directly: a search of sys.path would find the shim again.
        spec = OldPathFinder(name).find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
