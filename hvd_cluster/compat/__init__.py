"""``import hvd_cluster.compat`` makes ``import horovod`` mean hvd_cluster.

It does so here and in workers launched here. ``horovod`` is then a separate module (``horovod.__version__`` is
"0.28.1", and so is the version in its metadata); the paths below it forward to ours by
:mod:`hvd_cluster.oldpaths.table`. If the real Horovod is installed, the import raises ``ImportError``: parts of a
program that use different libraries would wait for each other forever.

If petastorm is not installed, ``import petastorm...`` resolves to :mod:`hvd_cluster.petastorm`; if Databricks' sparkdl
is not, ``from sparkdl import HorovodRunner`` resolves to :mod:`hvd_cluster.spark.horovod_runner`.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

from hvd_cluster.oldpaths.finder import OldPathFinder, serve, shim_folder


def real_horovod() -> str:
    """A description of the installed Horovod; "" if there is none."""
    ours = Path(shim_folder()).resolve()
    for found in distributions(name="horovod"):
        if Path(str(found.locate_file(""))).resolve() != ours:
            return f"version {found.version} is installed"
    loaded = sys.modules.get("horovod")
    spec = PathFinder.find_spec("horovod") if loaded is None else loaded.__spec__
    # A folder that happens to be called "horovod" has no origin.
    if spec is None or spec.origin is None or isinstance(spec.loader, OldPathFinder):
        return ""
    return "" if spec.origin.startswith(shim_folder()) else f"it is at {spec.origin}"


def _install() -> None:
    if where := real_horovod():
        raise ImportError(
            f"hvd_cluster.compat serves `import horovod`, but the real Horovod is also present: {where}. Uninstall it "
            "(pip uninstall horovod), or import hvd_cluster's own names, such as hvd_cluster.torch, without compat."
        )
    serve("horovod", first=True)
    # If these packages are installed, they come before ours.
    serve("petastorm", first=False)
    serve("sparkdl", first=False)


_install()
