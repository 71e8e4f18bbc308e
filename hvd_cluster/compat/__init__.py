"""``import hvd_cluster.compat`` makes ``import horovod...`` resolve to hvd_cluster, here and in workers launched here.

``horovod`` is then a module of its own (``horovod.__version__`` is "0.28.1", and its metadata says so too); the paths
below it forward to ours by :mod:`hvd_cluster.oldpaths.table`. Where the real Horovod is installed, the import refuses:
two libraries cannot serve one name: the halves of a program would wait for each other forever.

Where petastorm is not installed, ``import petastorm...`` leads to :mod:`hvd_cluster.petastorm`; where Databricks'
sparkdl is not, ``from sparkdl import HorovodRunner`` to :mod:`hvd_cluster.spark.horovod_runner`.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

from hvd_cluster.oldpaths.finder import OldPathFinder, serve, shim_folder


def real_horovod() -> str:
    """Where the real Horovod is, in words; "" where there is none."""
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
            f"hvd_cluster.compat answers for `import horovod`, but the real Horovod is here: {where}. Uninstall it "
            "(pip uninstall horovod), or import hvd_cluster's own names, such as hvd_cluster.torch, without compat."
        )
    serve("horovod", first=True)
    # Their own packages, where they are installed and import, come before ours.
    serve("petastorm", first=False)
    serve("sparkdl", first=False)


_install()
