"""Where each module path of Horovod, petastorm and sparkdl lives now: the only place to edit when a path is added.

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
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
)
_TORCH_ESTIMATOR = _from("hvd_cluster.estimators", "TorchEstimator", "TorchModel")
_KERAS_ESTIMATOR = _from("hvd_cluster.estimators", "KerasEstimator", "KerasModel")
# Horovod's has the name of the one for torch.
_LIGHTNING_ESTIMATOR = {
    "TorchEstimator": "hvd_cluster.estimators.lightning.estimator:HorovodLightningEstimator",
    "LightningEstimator": "hvd_cluster.estimators.lightning.estimator:HorovodLightningEstimator",
    **_from("hvd_cluster.estimators", "TorchModel"),
}
_DATA_MODULES = _from("hvd_cluster.estimators.run.data_module", "PetastormDataModule", "NVTabularDataModule")
_LOADERS = _from("hvd_cluster.data.loaders", "BaseDataLoader", "AsyncDataLoaderMixin")
_RUN = {"run": "hvd_cluster:run"}

_NOTIFICATIONS = {"notification_manager": "hvd_cluster.elastic.notification:notifications"}

#: Old path below the root -> its row.
TABLE: Mapping[str, Row] = {
    "": Row(names={"__version__": "hvd_cluster.oldpaths.table:HOROVOD_VERSION", **_RUN}),
    "common.basics": Row(module="hvd_cluster.engine.basics"),
    "common.elastic": Row(
        module="hvd_cluster.elastic.state", names=_from("hvd_cluster.elastic.loop", "run_fn") | _NOTIFICATIONS
    ),
    "common.exceptions": Row(
        names=_from(
            "hvd_cluster.errors", "HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"
        )
    ),
    "common.process_sets": Row(module="hvd_cluster.engine.process_sets"),
    "common.util": Row(names=_from("hvd_cluster.engine.basics", "gloo_built", "mpi_built")),
    "data": Row(names=_LOADERS),
    "data.data_loader_base": Row(names=_LOADERS),
    "keras": Row(module="hvd_cluster.keras"),
    "keras.callbacks": Row(module="hvd_cluster.keras.callbacks"),
    "keras.elastic": Row(module="hvd_cluster.keras.elastic"),
    "_keras.callbacks": Row(module="hvd_cluster.keras.callbacks"),
    "_keras.elastic": Row(module="hvd_cluster.keras.elastic"),
    "mxnet": Row(module="hvd_cluster.mxnet"),
    "mxnet.compression": Row(module="hvd_cluster.mxnet.compression"),
    "mxnet.functions": Row(module="hvd_cluster.mxnet.functions"),
    "mxnet.mpi_ops": Row(module="hvd_cluster.mxnet.ops", names=_BASICS),
    "ray": Row(module="hvd_cluster.ray"),
    "ray.adapter": Row(module="hvd_cluster.ray.adapter"),
    "ray.elastic": Row(module="hvd_cluster.ray.elastic"),
    "ray.elastic_v2": Row(
        names=_from("hvd_cluster.ray.elastic", "RayHostDiscovery", "TestDiscovery")
        | _from("hvd_cluster.ray.elastic_adapter", "ElasticAdapter")
    ),
    "ray.ray_logger": Row(module="hvd_cluster.ray.ray_logger"),
    "ray.runner": Row(
        names=_from("hvd_cluster.ray.executor", "RayExecutor")
        | _from("hvd_cluster.ray.coordinator", "Coordinator")
        | _from("hvd_cluster.ray.settings", "MiniSettings")
        | _from("hvd_cluster.ray.static", "StaticAdapter")
        | _from("hvd_cluster.ray.worker", "BaseHorovodWorker")
    ),
    "ray.strategy": Row(module="hvd_cluster.ray.strategy"),
    "ray.utils": Row(module="hvd_cluster.ray.nics", names=_from("hvd_cluster.ray.settings", "nics_to_env_var")),
    "ray.worker": Row(module="hvd_cluster.ray.worker"),
    "runner": Row(names=_RUN),
    "runner.common.service.compute_service": Row(
        names=_from("hvd_cluster.tensorflow.data.registry", "ComputeService", "ComputeClient")
    ),
    "runner.elastic.discovery": Row(module="hvd_cluster.launch.elastic.discovery"),
    "runner.launch": Row(
        module="hvd_cluster.launch.cli.main",
        names={
            "run_commandline": "hvd_cluster.launch.cli.main:main",
            **_from("hvd_cluster.engine.basics", "gloo_built", "mpi_built"),
        },
    ),
    "spark": Row(module="hvd_cluster.spark"),
    "spark.conf": Row(module="hvd_cluster.spark.conf"),
    "spark.runner": Row(names=_from("hvd_cluster.spark", "run", "run_elastic")),
    "spark.task": Row(names=_from("hvd_cluster.spark.devices", "get_available_devices")),
    "spark.common.backend": Row(module="hvd_cluster.estimators.backend"),
    "spark.common.store": Row(
        module="hvd_cluster.data.store",
        names=_from("hvd_cluster.data.files.store_families", "HDFSStore", "DBFSLocalStore"),
    ),
    "spark.common.datamodule": Row(module="hvd_cluster.estimators.run.data_module"),
    "spark.common.params": Row(names=_from("hvd_cluster.estimators.params", "EstimatorParams", "ModelParams")),
    "spark.common.util": Row(module="hvd_cluster.estimators.prepared_data"),
    "spark.data_loaders.pytorch_data_loaders": Row(module="hvd_cluster.data.petastorm.loaders"),
    "spark.keras": Row(names=_KERAS_ESTIMATOR),
    "spark.keras.datamodule": Row(names=_DATA_MODULES),
    "spark.keras.estimator": Row(names=_KERAS_ESTIMATOR),
    "spark.lightning": Row(names=_LIGHTNING_ESTIMATOR),
    "spark.lightning.datamodule": Row(module="hvd_cluster.estimators.lightning.datamodule"),
    "spark.lightning.estimator": Row(names=_LIGHTNING_ESTIMATOR),
    "spark.tensorflow.compute_worker": Row(module="hvd_cluster.spark.compute_worker"),
    "spark.torch": Row(names=_TORCH_ESTIMATOR),
    "spark.torch.datamodule": Row(names=_DATA_MODULES),
    "spark.torch.estimator": Row(names=_TORCH_ESTIMATOR),
    "tensorflow": Row(module="hvd_cluster.tensorflow"),
    "tensorflow.compression": Row(module="hvd_cluster.tensorflow.compression"),
    "tensorflow.data.compute_service": Row(module="hvd_cluster.tensorflow.data.compute_service"),
    "tensorflow.data.compute_worker": Row(module="hvd_cluster.tensorflow.data.compute_worker"),
    "tensorflow.elastic": Row(module="hvd_cluster.tensorflow.elastic"),
    "tensorflow.functions": Row(
        module="hvd_cluster.tensorflow.functions", names=_from("hvd_cluster.tensorflow.ops", "broadcast_variables")
    ),
    "tensorflow.gradient_aggregation": Row(
        names=_from("hvd_cluster.tensorflow.pass_aggregation", "LocalGradientAggregationHelper")
    ),
    "tensorflow.gradient_aggregation_eager": Row(
        names=_from("hvd_cluster.tensorflow.pass_aggregation", "LocalGradientAggregationHelperEager")
    ),
    "tensorflow.keras": Row(module="hvd_cluster.keras"),
    "tensorflow.keras.callbacks": Row(module="hvd_cluster.keras.callbacks"),
    "tensorflow.keras.elastic": Row(module="hvd_cluster.keras.elastic"),
    "tensorflow.mpi_ops": Row(module="hvd_cluster.tensorflow.ops", names=_BASICS),
    "tensorflow.sync_batch_norm": Row(module="hvd_cluster.tensorflow.sync_batch_norm"),
    "tensorflow.util": Row(
        names={"_executing_eagerly": "tensorflow:executing_eagerly", "_make_subgraph": "tensorflow:function"}
    ),
    "torch": Row(module="hvd_cluster.torch"),
    "torch.compression": Row(module="hvd_cluster.torch.compression"),
    "torch.elastic": Row(module="hvd_cluster.torch.elastic"),
    "torch.elastic.sampler": Row(module="hvd_cluster.torch.elastic.sampler"),
    "torch.elastic.state": Row(module="hvd_cluster.torch.elastic.state"),
    "torch.functions": Row(module="hvd_cluster.torch.functions"),
    "torch.mpi_ops": Row(module="hvd_cluster.torch.ops", names=_BASICS),
    "torch.optimizer": Row(module="hvd_cluster.torch.optimizer"),
    "torch.sync_batch_norm": Row(module="hvd_cluster.torch.sync_batch_norm"),
}

_PETASTORM = "hvd_cluster.data.petastorm"
_PETASTORM_READERS = _from(_PETASTORM, "make_reader", "make_batch_reader")
_CONVERTER = _from("hvd_cluster.data.converter", "SparkDatasetConverter", "make_spark_converter")

#: Path below ``petastorm`` -> its row; petastorm's own names that are not here (``hdfs``, ``ngram``, ``tools``) are not
#: served.
PETASTORM_TABLE: Mapping[str, Row] = {
    "": Row(
        names={
            "__version__": f"{_PETASTORM}:PETASTORM_VERSION",
            **_PETASTORM_READERS,
            **_from(_PETASTORM, "TransformSpec", "NoDataAvailableError"),
        }
    ),
    "codecs": Row(module=f"{_PETASTORM}.codecs"),
    "errors": Row(names=_from(f"{_PETASTORM}.errors", "NoDataAvailableError")),
    "etl.dataset_metadata": Row(
        names={
            **_from(f"{_PETASTORM}.spark", "materialize_dataset"),
            **_from(f"{_PETASTORM}.metadata", "get_schema_from_dataset_url"),
            **_from(f"{_PETASTORM}.errors", "PetastormMetadataError", "PetastormMetadataGenerationError"),
        }
    ),
    "local_disk_cache": Row(names=_from(f"{_PETASTORM}.cache", "LocalDiskCache")),
    "predicates": Row(module=f"{_PETASTORM}.predicates"),
    "pytorch": Row(module=f"{_PETASTORM}.pytorch"),
    "reader": Row(names={**_PETASTORM_READERS, **_from(f"{_PETASTORM}.reader", "Reader")}),
    "selectors": Row(module=f"{_PETASTORM}.selectors"),
    "spark": Row(names=_CONVERTER),
    "spark.spark_dataset_converter": Row(
        names={**_CONVERTER, **_from("hvd_cluster.data.converter", "register_delete_dir_handler")}
    ),
    "spark_utils": Row(names=_from(f"{_PETASTORM}.spark", "dataset_as_rdd")),
    "tf_utils": Row(names=_from(f"{_PETASTORM}.tf_utils", "make_petastorm_dataset")),
    "transform": Row(module=f"{_PETASTORM}.transform"),
    "unischema": Row(module=f"{_PETASTORM}.unischema"),
    "utils": Row(names=_from(f"{_PETASTORM}.errors", "DecodeFieldError")),
}

_HOROVOD_RUNNER = _from("hvd_cluster.spark.horovod_runner", "HorovodRunner")

#: Path below Databricks' ``sparkdl`` -> its row: HorovodRunner and what is used beside it.
SPARKDL_TABLE: Mapping[str, Row] = {
    "": Row(names=_HOROVOD_RUNNER),
    "horovod": Row(names={**_HOROVOD_RUNNER, **_from("hvd_cluster.spark.driver_log", "log_to_driver")}),
    "horovod.tensorflow.keras": Row(module="hvd_cluster.spark.log_callback"),
}

#: Root -> its table; Horovod's serves ``hvd_cluster`` as well as ``horovod``.
TABLES: Mapping[str, Mapping[str, Row]] = {"petastorm": PETASTORM_TABLE, "sparkdl": SPARKDL_TABLE}


def table_of(root: str) -> Mapping[str, Row]:
    """The table that serves a root."""
    return TABLES.get(root, TABLE)


def row_of(path: str, table: Mapping[str, Row] = TABLE) -> Row | None:
    """The row of an old path below the root; an empty row for a package between rows; None for a path nobody knows."""
    if path in table:
        return table[path]
    return Row() if any(known.startswith(f"{path}.") for known in table) else None


def children_of(path: str, table: Mapping[str, Row] = TABLE) -> set[str]:
    """The names of the modules one step below ``path``."""
    prefix = f"{path}." if path else ""
    return {known[len(prefix) :].split(".")[0] for known in table if known and known.startswith(prefix)}
