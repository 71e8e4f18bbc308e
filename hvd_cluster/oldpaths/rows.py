"""The rows of the table of old paths, and names that several rows share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Row:
    """An old module: where its names are now."""

    #: Our module that replaces it; empty if ``names`` has all names.
    module: str = ""
    #: Old name -> our "module:attribute", for names that are elsewhere or have another name now.
    names: Mapping[str, str] = field(default_factory=dict)
    #: Old name that hvd_cluster does not have -> what it belonged to and what to use instead, as the end of a sentence.
    absent: Mapping[str, str] = field(default_factory=dict)


def names_from(module: str, *names: str) -> dict[str, str]:
    """Names that our ``module`` has under the same name."""
    return {name: f"{module}:{name}" for name in names}


def absent_names(instead: str, *names: str) -> dict[str, str]:
    """Names that hvd_cluster does not have, with one alternative."""
    return dict.fromkeys(names, instead)


COMMON = "hvd_cluster.engine.horovod_common"
BUILT = names_from(
    COMMON, "gloo_built", "mpi_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"
)
ELASTIC_DRIVER = "a part of Horovod's elastic driver: use hvdrun --min-np, or hvd_cluster.run(min_num_proc=...)"
RUN = {"run": "hvd_cluster:run"}
