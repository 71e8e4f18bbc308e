"""One row of the table of old paths, and the names that rows of several of Horovod's packages share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Row:
    """One old module."""

    #: Our module that has what the old one had; empty when ``names`` says it all.
    module: str = ""
    #: Old name -> "module:attribute" of ours, for names that live elsewhere or are spelt differently now.
    names: Mapping[str, str] = field(default_factory=dict)
    #: Old name of what is not here -> what it belonged to and what to use instead, as the end of a sentence.
    absent: Mapping[str, str] = field(default_factory=dict)


def names_from(module: str, *names: str) -> dict[str, str]:
    """Names that ``module`` of ours has under the same spelling."""
    return {name: f"{module}:{name}" for name in names}


def absent_names(instead: str, *names: str) -> dict[str, str]:
    """Names that are not here, for one reason."""
    return dict.fromkeys(names, instead)


COMMON = "hvd_cluster.engine.horovod_common"
BUILT = names_from(
    COMMON, "gloo_built", "mpi_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"
)
ELASTIC_DRIVER = "a part of Horovod's elastic driver: use hvdrun --min-np, or hvd_cluster.run(min_num_proc=...)"
RUN = {"run": "hvd_cluster:run"}
