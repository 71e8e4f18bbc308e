"""The tables that map module paths of other packages to ours.

The packages are Horovod, petastorm and sparkdl. This is the only place to add a path. A row maps the path below the
root (``torch.mpi_ops`` for ``horovod.torch.mpi_ops``) to one of our modules, whose attributes it then has (but not its
submodules, which need rows), or to single names, each as ``"module:attribute"``, or to both; ``names`` take precedence.
Programs also import names from modules that only imported them, so rows list those too. A name in ``absent`` can be
imported, and raises an error with an alternative when it is used. Packages between the rows (``common``,
``spark.common``) need no row.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_cluster.oldpaths.frameworks import FRAMEWORKS
from hvd_cluster.oldpaths.launchers import LAUNCHERS
from hvd_cluster.oldpaths.rows import RUN, Row, names_from

#: The release with which we are compatible; programs compare it with a minimum.
HOROVOD_VERSION = "0.28.1"

#: Old path below the root -> its row.
TABLE: Mapping[str, Row] = {
    "": Row(names={"__version__": "hvd_cluster.oldpaths.table:HOROVOD_VERSION", **RUN}),
    **FRAMEWORKS,
    **LAUNCHERS,
}

_PETASTORM = "hvd_cluster.petastorm"
_PETASTORM_READERS = names_from(_PETASTORM, "make_reader", "make_batch_reader")
_CONVERTER = names_from("hvd_cluster.petastorm.converter", "SparkDatasetConverter", "make_spark_converter")

#: Path below ``petastorm`` -> its row; petastorm's own names that are not here (``hdfs``, ``ngram``, ``tools``) are not
#: served.
PETASTORM_TABLE: Mapping[str, Row] = {
    "": Row(
        names={
            "__version__": f"{_PETASTORM}:PETASTORM_VERSION",
            **_PETASTORM_READERS,
            **names_from(_PETASTORM, "TransformSpec", "NoDataAvailableError"),
        }
    ),
    "codecs": Row(module=f"{_PETASTORM}.codecs"),
    "errors": Row(names=names_from(f"{_PETASTORM}.errors", "NoDataAvailableError")),
    "etl.dataset_metadata": Row(
        names={
            **names_from(f"{_PETASTORM}.spark", "materialize_dataset"),
            **names_from(f"{_PETASTORM}.metadata", "get_schema_from_dataset_url"),
            **names_from(f"{_PETASTORM}.errors", "PetastormMetadataError", "PetastormMetadataGenerationError"),
        }
    ),
    "local_disk_cache": Row(names=names_from(f"{_PETASTORM}.cache", "LocalDiskCache")),
    "predicates": Row(module=f"{_PETASTORM}.predicates"),
    "pytorch": Row(module=f"{_PETASTORM}.pytorch"),
    "reader": Row(names={**_PETASTORM_READERS, **names_from(f"{_PETASTORM}.reader", "Reader")}),
    "selectors": Row(module=f"{_PETASTORM}.selectors"),
    "spark": Row(names=_CONVERTER),
    "spark.spark_dataset_converter": Row(
        names={**_CONVERTER, **names_from("hvd_cluster.petastorm.converter", "register_delete_dir_handler")}
    ),
    "spark_utils": Row(names=names_from(f"{_PETASTORM}.spark", "dataset_as_rdd")),
    "tf_utils": Row(names=names_from(f"{_PETASTORM}.tf_utils", "make_petastorm_dataset")),
    "transform": Row(module=f"{_PETASTORM}.transform"),
    "unischema": Row(module=f"{_PETASTORM}.unischema"),
    "utils": Row(names=names_from(f"{_PETASTORM}.errors", "DecodeFieldError")),
}

_HOROVOD_RUNNER = names_from("hvd_cluster.spark.horovod_runner", "HorovodRunner")

#: Path below Databricks' ``sparkdl`` -> its row: HorovodRunner and what is used beside it.
SPARKDL_TABLE: Mapping[str, Row] = {
    "": Row(names=_HOROVOD_RUNNER),
    "horovod": Row(names={**_HOROVOD_RUNNER, **names_from("hvd_cluster.spark.driver_log", "log_to_driver")}),
    "horovod.tensorflow.keras": Row(module="hvd_cluster.spark.log_callback"),
}

#: Modules of ours that have moved: old path below ``hvd_cluster`` -> new path.
_MOVED = {
    "data.converter": "petastorm.converter",
    "data.petastorm": "petastorm",
    "tensorflow.pass_aggregation": "tensorflow.horovod_names",
    **{
        f"data.petastorm.{module}": f"petastorm.{module}"
        for module in (
            *("cache", "codecs", "errors", "factories", "loaders", "metadata", "predicates", "pytorch", "reader"),
            *("selectors", "spark", "spark_types", "tf_utils", "transform", "unischema", "unischema_field", "writer"),
        )
    },
}
OWN_TABLE: Mapping[str, Row] = {**TABLE, **{old: Row(module=f"hvd_cluster.{new}") for old, new in _MOVED.items()}}

#: Root -> its table. ``hvd_cluster`` serves Horovod's paths too.
TABLES: Mapping[str, Mapping[str, Row]] = {
    "horovod": TABLE,
    "hvd_cluster": OWN_TABLE,
    "petastorm": PETASTORM_TABLE,
    "sparkdl": SPARKDL_TABLE,
}


def row_of(path: str, table: Mapping[str, Row] = TABLE) -> Row | None:
    """The row of an old path below the root; None for an unknown path.

    A package between rows has an empty row.
    """
    if path in table:
        return table[path]
    return Row() if any(known.startswith(f"{path}.") for known in table) else None


def homes_of(name: str, table: Mapping[str, Row] = TABLE) -> list[str]:
    """Our modules that have a name which some row lists."""
    return sorted({row.names[name].partition(":")[0] for row in table.values() if name in row.names})


def children_of(path: str, table: Mapping[str, Row] = TABLE) -> set[str]:
    """The names of the modules one step below ``path``."""
    prefix = f"{path}." if path else ""
    return {known[len(prefix) :].split(".")[0] for known in table if known and known.startswith(prefix)}
