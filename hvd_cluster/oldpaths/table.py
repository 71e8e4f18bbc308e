"""Where each of Horovod's module paths lives now: the one table, and the only place to edit when a path is added.

A row maps the path below the root (``torch.mpi_ops`` for ``horovod.torch.mpi_ops``) to one of our modules, whose
attributes it then has (not its submodules: a path is served where a row says so), or to single names, each as
``"module:attribute"``, or to both; a name in ``names`` wins. Paths between the rows (``common``, ``spark.common``)
need no row of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The release whose behaviour we answer for; programs compare it with a minimum.
HOROVOD_VERSION = "0.28.1"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One old module."""

    #: Our module that has what the old one had; empty when ``names`` says it all.
    module: str = ""
    #: Old name -> "module:attribute" of ours, for names that live elsewhere or are spelt differently now.
    names: Mapping[str, str] = field(default_factory=dict)


def _from(module: str, *names: str) -> dict[str, str]:
    """Names that ``module`` of ours has under the same spelling."""
    return {name: f"{module}:{name}" for name in names}


_BASICS = _from(
    "hvd_cluster.engine.basics",
    "init",
    "shutdown",
    "is_initialized",
    "is_homogeneous",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "start_timeline",
    "stop_timeline",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
)
_TORCH_ESTIMATOR = _from("hvd_cluster.estimators", "TorchEstimator", "TorchModel")
_RUN = {"run": "hvd_cluster:run"}

#: Old path below the root -> its row.
TABLE: Mapping[str, Row] = {
    "": Row(names={"__version__": "hvd_cluster.oldpaths.table:HOROVOD_VERSION", **_RUN}),
    "common.basics": Row(module="hvd_cluster.engine.basics"),
    "common.exceptions": Row(
        names=_from(
            "hvd_cluster.errors", "HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"
        )
    ),
    "common.process_sets": Row(module="hvd_cluster.engine.process_sets"),
    "common.util": Row(names=_from("hvd_cluster.engine.basics", "gloo_built", "mpi_built")),
    "runner": Row(names=_RUN),
    "runner.launch": Row(
        module="hvd_cluster.launch.cli.main", names={"run_commandline": "hvd_cluster.launch.cli.main:main"}
    ),
    "spark": Row(module="hvd_cluster.spark"),
    "spark.runner": Row(names=_from("hvd_cluster.spark", "run")),
    "spark.common.backend": Row(module="hvd_cluster.estimators.backend"),
    "spark.common.store": Row(
        module="hvd_cluster.data.store", names=_from("hvd_cluster.data.store_families", "HDFSStore", "DBFSLocalStore")
    ),
    "spark.torch": Row(names=_TORCH_ESTIMATOR),
    "spark.torch.estimator": Row(names=_TORCH_ESTIMATOR),
    "torch": Row(module="hvd_cluster.torch"),
    "torch.compression": Row(module="hvd_cluster.torch.compression"),
    "torch.functions": Row(module="hvd_cluster.torch.functions"),
    "torch.mpi_ops": Row(module="hvd_cluster.torch.ops", names=_BASICS),
    "torch.optimizer": Row(module="hvd_cluster.torch.optimizer"),
}


def row_of(path: str) -> Row | None:
    """The row of an old path below the root; an empty row for a package between rows; None for a path nobody knows."""
    if path in TABLE:
        return TABLE[path]
    return Row() if any(known.startswith(f"{path}.") for known in TABLE) else None


def children_of(path: str) -> set[str]:
    """The names of the modules one step below ``path``."""
    prefix = f"{path}." if path else ""
    return {known[len(prefix) :].split(".")[0] for known in TABLE if known and known.startswith(prefix)}
