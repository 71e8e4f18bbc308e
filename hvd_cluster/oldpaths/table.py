"""Where each module path of Horovod, petastorm and sparkdl lives now: the only place to edit when a path is added.

A row maps the path below the root (``torch.mpi_ops`` for ``horovod.torch.mpi_ops``) to one of our modules, whose
attributes it then has (not its submodules: a path is served where a row says so), or to single names, each as
``"module:attribute"``, or to both; a name in ``names`` wins. Programs also import names from modules that merely
imported them, so rows list those too. A name in ``absent`` imports, and says what to use instead when it is used.
Paths between the rows (``common``, ``spark.common``) need no row of their own.
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
    #: Old name of what is not here -> what it belonged to and what to use instead, as the end of a sentence.
    absent: Mapping[str, str] = field(default_factory=dict)


def _from(module: str, *names: str) -> dict[str, str]:
    """Names that ``module`` of ours has under the same spelling."""
    return {name: f"{module}:{name}" for name in names}


def _absent(instead: str, *names: str) -> dict[str, str]:
    """Names that are not here, for one reason."""
    return dict.fromkeys(names, instead)


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
_PROCESS_SETS = _from(
    "hvd_cluster.engine.process_sets", "ProcessSet", "global_process_set", "add_process_set", "remove_process_set"
)
_ERRORS = _from("hvd_cluster.errors", "HorovodInternalError", "HostsUpdatedInterrupt")
_COMMON = "hvd_cluster.engine.horovod_common"
_BUILT = _from(_COMMON, "gloo_built", "mpi_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built")
_HELPERS = _from(
    _COMMON,
    "check_extension",
    "check_installed_version",
    "extension_available",
    "gpu_available",
    "is_version_greater_equal_than",
    "num_rank_is_power_2",
    "split_list",
)
_MPI_OPS = _BASICS | _PROCESS_SETS | _ERRORS | _HELPERS | _from(_COMMON, "HorovodBasics", "_basics")

_TORCH_OPS = _from(
    "hvd_cluster.torch.ops",
    *("Adasum", "Average", "Sum", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async"),
    *("allreduce_async_", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allreduce_async_"),
    *("poll", "sparse_allreduce_async", "synchronize"),
)
_TORCH_FUNCTIONS = _from(
    "hvd_cluster.torch.functions",
    *("allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"),
)
_TORCH_COMMON = _BASICS | _PROCESS_SETS | _ERRORS | _TORCH_OPS | _from("hvd_cluster.torch.compression", "Compression")

_TF_PRIVATE = _from(
    "hvd_cluster.tensorflow.horovod_names",
    *("_allreduce", "_cache", "_executing_eagerly", "_grouped_allreduce", "_grouped_reducescatter"),
    *("_LegacyOptimizer", "_make_subgraph", "_normalize_name", "_reducescatter", "_SessionRunHook", "refs_to_vars"),
    "vars_to_refs",
)
_TF_HELPERS = {"check_num_rank_power_of_2": f"{_COMMON}:num_rank_is_power_2", **_HELPERS}
_TF_AGGREGATION = _from(
    "hvd_cluster.tensorflow.pass_aggregation", "LocalGradientAggregationHelper", "LocalGradientAggregationHelperEager"
)
_TF_OPS = _from(
    "hvd_cluster.tensorflow.ops",
    *("Adasum", "Average", "Sum", "allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "rank_op"),
    *("broadcast_variables", "reducescatter", "size_op"),
)
_ELASTIC = {
    **_from("hvd_cluster.elastic.state", "HostUpdateResult", "ObjectState", "State"),
    **_from("hvd_cluster.elastic.loop", "run_fn"),
}

_TORCH_ESTIMATOR = _from("hvd_cluster.estimators", "TorchEstimator", "TorchModel")
_KERAS_ESTIMATOR = _from("hvd_cluster.estimators", "KerasEstimator", "KerasModel")
_ESTIMATOR_BASES = {
    "HorovodEstimator": "hvd_cluster.estimators.estimator:DistributedEstimator",
    "HorovodModel": "hvd_cluster.estimators.model:FittedModel",
}
# What the three estimators' own modules have beside the estimator and the model.
_ESTIMATOR_MODULE = {
    **_ESTIMATOR_BASES,
    **_from("hvd_cluster.estimators.params", "EstimatorParams", "ModelParams"),
    **_from("hvd_cluster.estimators.backend", "SparkBackend"),
    **_from("hvd_cluster.estimators.prepared_data", "prepare_data"),
}
_SERIALIZATION = {
    "HorovodParamsReader": "hvd_cluster.estimators.stages.persistence:StageReader",
    "HorovodParamsWriter": "hvd_cluster.estimators.stages.persistence:StageWriter",
}
# Horovod's has the name of the one for torch.
_LIGHTNING_ESTIMATOR = {
    "TorchEstimator": "hvd_cluster.estimators.lightning.estimator:HorovodLightningEstimator",
    "LightningEstimator": "hvd_cluster.estimators.lightning.estimator:HorovodLightningEstimator",
    **_from("hvd_cluster.estimators", "TorchModel"),
}
_DATA_MODULES = _from("hvd_cluster.estimators.run.data_module", "PetastormDataModule", "NVTabularDataModule")
_LOADERS = _from("hvd_cluster.data.loaders", "BaseDataLoader", "AsyncDataLoaderMixin")
_RUN = {"run": "hvd_cluster:run"}

_LAUNCH = "hvd_cluster.launch.horovod"
_LAUNCHER = "a part of Horovod's launcher: use hvdrun or hvd_cluster.run"
_SERVICES = (
    "a part of Horovod's launcher, whose services talk to each other: use hvd_cluster.run or hvd_cluster.spark.run"
)
_MPI = "because MPI is not used: use hvdrun, or start the script under mpirun or srun as it is"
_STORE = "Horovod's rendezvous server: workers of hvdrun, hvd_cluster.run, Spark and Ray meet by themselves"
_ELASTIC_DRIVER = "a part of Horovod's elastic driver: use hvdrun --min-np, or hvd_cluster.run(min_num_proc=...)"
_SPARK_INSIDE = "the inside of horovod.spark: use hvd_cluster.spark.run, run_elastic or an estimator"
_ESTIMATOR_INSIDE = (
    "the inside of Horovod's estimators: use the estimator itself, or subclass it (_fit, get_model_class, "
    "_get_model_kwargs, get_prediction_fn)"
)
_STORED_PARAMS = _absent(
    _ESTIMATOR_INSIDE,
    *("TorchEstimatorParamsReadable", "TorchEstimatorParamsReader", "TorchEstimatorParamsWritable"),
    *("TorchEstimatorParamsWriter", "_torch_param_serialize"),
)
_KERAS_BACKED = "the inside of horovod.keras: use the name without _keras and Impl, in hvd_cluster.keras"

_NOTIFICATIONS = {"notification_manager": "hvd_cluster.elastic.notification:notifications"}

#: Old path below the root -> its row.
TABLE: Mapping[str, Row] = {
    "": Row(names={"__version__": "hvd_cluster.oldpaths.table:HOROVOD_VERSION", **_RUN}),
    "common.basics": Row(module="hvd_cluster.engine.basics", names=_from(_COMMON, "HorovodBasics")),
    "common.elastic": Row(
        module="hvd_cluster.elastic.state",
        names=_from("hvd_cluster.elastic.loop", "run_fn") | _NOTIFICATIONS | _ERRORS,
        absent=_absent(_ELASTIC_DRIVER, "WorkerNotificationManager"),
    ),
    "common.exceptions": Row(
        names=_from(
            "hvd_cluster.errors", "HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"
        )
        | _from(_COMMON, "get_version_mismatch_message")
    ),
    "common.process_sets": Row(
        module="hvd_cluster.engine.process_sets", names=_from(_COMMON, "HorovodBasics", "_temp_process_set_object")
    ),
    "common.util": Row(names=_BUILT | _HELPERS | _from(_COMMON, "env", "is_iterable")),
    "data": Row(names=_LOADERS),
    "data.data_loader_base": Row(names=_LOADERS),
    "keras": Row(module="hvd_cluster.keras"),
    "keras.callbacks": Row(module="hvd_cluster.keras.callbacks"),
    "keras.elastic": Row(module="hvd_cluster.keras.elastic"),
    "_keras": Row(
        names=_from("hvd_cluster.keras", "DistributedOptimizer", "load_model"),
        absent=_absent(_KERAS_BACKED, "create_distributed_optimizer"),
    ),
    "_keras.callbacks": Row(
        module="hvd_cluster.keras.callbacks",
        absent=_absent(
            _KERAS_BACKED,
            "BroadcastGlobalVariablesCallbackImpl",
            "MetricAverageCallbackImpl",
            "LearningRateScheduleCallbackImpl",
            "LearningRateWarmupCallbackImpl",
        ),
    ),
    "_keras.elastic": Row(
        module="hvd_cluster.keras.elastic",
        absent=_absent(
            _KERAS_BACKED, "CommitStateCallbackImpl", "UpdateBatchStateCallbackImpl", "UpdateEpochStateCallbackImpl"
        ),
    ),
    "mxnet": Row(module="hvd_cluster.mxnet"),
    "mxnet.compression": Row(module="hvd_cluster.mxnet.compression"),
    "mxnet.functions": Row(module="hvd_cluster.mxnet.functions"),
    "mxnet.mpi_ops": Row(module="hvd_cluster.mxnet.ops", names=_MPI_OPS),
    "ray": Row(module="hvd_cluster.ray"),
    "ray.adapter": Row(module="hvd_cluster.ray.adapter"),
    "ray.driver_service": Row(absent=_absent(_SERVICES, "_driver_fn")),
    "ray.elastic": Row(module="hvd_cluster.ray.elastic"),
    "ray.elastic_v2": Row(
        names=_from("hvd_cluster.ray.elastic", "RayHostDiscovery", "TestDiscovery")
        | _from("hvd_cluster.ray.elastic_adapter", "ElasticAdapter")
    ),
    "ray.ray_logger": Row(module="hvd_cluster.ray.ray_logger"),
    "ray.runner": Row(
        names=_from("hvd_cluster.ray.executor", "RayExecutor")
        | _from("hvd_cluster.ray.coordinator", "Coordinator")
        | _from("hvd_cluster.ray.settings", "MiniSettings", "nics_to_env_var")
        | _from("hvd_cluster.ray.adapter", "Adapter")
        | _from("hvd_cluster.ray.static", "StaticAdapter")
        | _from("hvd_cluster.ray.elastic_adapter", "ElasticAdapter")
        | _from("hvd_cluster.ray.strategy", "ColocatedStrategy", "PGStrategy")
        | _from("hvd_cluster.ray.nics", "detect_nics", "map_blocking")
        | _from("hvd_cluster.ray.worker", "BaseHorovodWorker"),
        absent=_absent(_STORE, "RendezvousServer"),
    ),
    "ray.strategy": Row(module="hvd_cluster.ray.strategy"),
    "ray.utils": Row(module="hvd_cluster.ray.nics", names=_from("hvd_cluster.ray.settings", "nics_to_env_var")),
    "ray.worker": Row(module="hvd_cluster.ray.worker"),
    "runner": Row(names=_RUN | _from(f"{_LAUNCH}.arguments", "_HorovodArgs")),
    "runner.common.service.compute_service": Row(
        names=_from("hvd_cluster.tensorflow.data.registry", "ComputeService", "ComputeClient")
    ),
    "runner.common.service.driver_service": Row(
        absent=_absent(_SERVICES, "BasicDriverService", "BasicDriverClient", "DriverService", "DriverClient")
    ),
    "runner.common.service.task_service": Row(
        absent=_absent(_SERVICES, "BasicTaskService", "BasicTaskClient", "TaskService", "TaskClient")
    ),
    "runner.common.util.codec": Row(module=f"{_LAUNCH}.codec"),
    "runner.common.util.config_parser": Row(module=f"{_LAUNCH}.config_parser"),
    "runner.common.util.env": Row(module=f"{_LAUNCH}.variables"),
    "runner.common.util.host_hash": Row(names=_from(f"{_LAUNCH}.hosts", "host_hash")),
    "runner.common.util.hosts": Row(module=f"{_LAUNCH}.hosts"),
    "runner.common.util.network": Row(
        module=f"{_LAUNCH}.network",
        absent=_absent(
            _SERVICES,
            *("AckResponse", "AckStreamResponse", "BasicClient", "BasicService", "NoValidAddressesFound"),
            *("PingRequest", "PingResponse", "Wire", "find_port"),
        ),
    ),
    "runner.common.util.safe_shell_exec": Row(
        absent=_absent("how Horovod's launcher runs a command: use subprocess.run", "execute")
    ),
    "runner.common.util.secret": Row(module=f"{_LAUNCH}.secret"),
    "runner.common.util.settings": Row(names=_from(f"{_LAUNCH}.settings", "BaseSettings", "Settings")),
    "runner.common.util.timeout": Row(module=f"{_LAUNCH}.timeout"),
    "runner.driver.driver_service": Row(
        absent=_absent(
            _SERVICES, "HorovodRunDriverClient", "HorovodRunDriverService", "get_common_interfaces", "_run_probe"
        )
    ),
    "runner.elastic.constants": Row(module=f"{_LAUNCH}.elastic_constants"),
    "runner.elastic.discovery": Row(
        module="hvd_cluster.launch.elastic.discovery", absent=_absent(_ELASTIC_DRIVER, "HostManager")
    ),
    "runner.elastic.driver": Row(
        names=_from(f"{_LAUNCH}.elastic_constants", "DISCOVER_HOSTS_FREQUENCY_SECS", "ELASTIC_TIMEOUT_SECS")
        | _from("hvd_cluster.launch.elastic.discovery", "FixedHosts", "HostDiscovery", "HostDiscoveryScript"),
        absent=_absent(_ELASTIC_DRIVER, "ElasticDriver", "HostManager", "ResultsRecorder"),
    ),
    "runner.elastic.registration": Row(
        names=_from(f"{_LAUNCH}.elastic_constants", "FAILURE", "READY", "SUCCESS"),
        absent=_absent(_ELASTIC_DRIVER, "WorkerStateRegistry"),
    ),
    "runner.elastic.rendezvous": Row(absent=_absent(_ELASTIC_DRIVER, "create_rendezvous_handler")),
    "runner.elastic.settings": Row(names=_from(f"{_LAUNCH}.settings", "ElasticSettings")),
    "runner.elastic.worker": Row(
        names=_from("hvd_cluster.elastic.state", "HostUpdateResult"),
        absent=_absent(
            _ELASTIC_DRIVER,
            *("HostsUpdatedRequest", "WorkerNotificationClient", "WorkerNotificationManager"),
            "WorkerNotificationService",
        ),
    ),
    "runner.gloo_run": Row(
        absent=_absent(
            _LAUNCHER, "get_run_command", "gloo_run", "gloo_run_elastic", "launch_gloo", "launch_gloo_elastic"
        )
    ),
    "runner.http.http_client": Row(absent=_absent(_STORE, "put_data_into_kvstore", "read_data_from_kvstore")),
    "runner.http.http_server": Row(
        absent=_absent(_STORE, "KVStoreHandler", "KVStoreServer", "RendezvousHandler", "RendezvousServer")
    ),
    "runner.js_run": Row(absent=_absent(_MPI, "is_jsrun_installed", "js_run")),
    "runner.launch": Row(
        module="hvd_cluster.launch.cli.main",
        names={
            "run_commandline": "hvd_cluster.launch.cli.main:main",
            **_from(f"{_LAUNCH}.arguments", "_HorovodArgs", "_run", "is_gloo_used"),
            **_from("hvd_cluster.launch.cli.build", "check_build"),
            **_BUILT,
            **_from(_COMMON, "extension_available"),
        },
        absent=_absent(_LAUNCHER, "run_controller", "gloo_run", "mpi_run", "js_run", "make_override_action"),
    ),
    "runner.mpi_run": Row(
        names=_from(f"{_LAUNCH}.arguments", "mpi_available"),
        absent=_absent(_MPI, "_get_mpi_implementation_flags", "get_mpi_implementation", "is_open_mpi", "mpi_run"),
    ),
    "runner.run_task": Row(absent=_absent(_LAUNCHER, "main")),
    "runner.task_fn": Row(absent=_absent(_LAUNCHER, "main")),
    "runner.util.cache": Row(absent=_absent("because nothing is cached about hosts", "Cache", "use_cache")),
    "runner.util.lsf": Row(
        absent=_absent("because hvdrun finds LSF's hosts itself: start it in the job without -np and -H", "LSFUtils")
    ),
    "runner.util.network": Row(module=f"{_LAUNCH}.network"),
    "runner.util.remote": Row(absent=_absent(_LAUNCHER, "get_remote_command", "get_ssh_command")),
    "runner.util.threads": Row(module=f"{_LAUNCH}.threads"),
    "spark": Row(module="hvd_cluster.spark"),
    "spark.conf": Row(module="hvd_cluster.spark.conf"),
    "spark.driver.driver_service": Row(absent=_absent(_SPARK_INSIDE, "SparkDriverClient", "SparkDriverService")),
    "spark.driver.host_discovery": Row(absent=_absent(_SPARK_INSIDE, "SparkDriverHostDiscovery")),
    "spark.driver.rsh": Row(absent=_absent(_SPARK_INSIDE, "rsh")),
    "spark.gloo_run": Row(absent=_absent(_SPARK_INSIDE, "gloo_run", "gloo_run_elastic")),
    "spark.mpi_run": Row(absent=_absent(_SPARK_INSIDE, "mpi_run")),
    "spark.runner": Row(names=_from("hvd_cluster.spark", "run", "run_elastic")),
    "spark.task": Row(names=_from("hvd_cluster.spark.devices", "get_available_devices")),
    "spark.task.gloo_exec_fn": Row(absent=_absent(_SPARK_INSIDE, "main")),
    "spark.task.task_service": Row(absent=_absent(_SPARK_INSIDE, "SparkTaskClient", "SparkTaskService")),
    "spark.common.backend": Row(module="hvd_cluster.estimators.backend"),
    "spark.common.cache": Row(
        absent=_absent("because fits share no prepared data: use fit_on_parquet to reuse it", "TrainingDataCache")
    ),
    "spark.common.constants": Row(module="hvd_cluster.estimators.horovod_constants"),
    "spark.common.estimator": Row(names=_ESTIMATOR_BASES),
    "spark.common.serialization": Row(names=_SERIALIZATION),
    "spark.common.store": Row(
        module="hvd_cluster.data.store",
        names=_from("hvd_cluster.data.files.store_families", "HDFSStore", "DBFSLocalStore"),
    ),
    "spark.common.datamodule": Row(module="hvd_cluster.estimators.run.data_module"),
    "spark.common.params": Row(names=_from("hvd_cluster.estimators.params", "EstimatorParams", "ModelParams")),
    "spark.common.util": Row(
        module="hvd_cluster.estimators.prepared_data", names=_from(f"{_LAUNCH}.hosts", "host_hash")
    ),
    "spark.data_loaders.pytorch_data_loaders": Row(module="hvd_cluster.petastorm.loaders"),
    "spark.keras": Row(names=_KERAS_ESTIMATOR),
    "spark.keras.datamodule": Row(names=_DATA_MODULES),
    "spark.keras.estimator": Row(
        names=_KERAS_ESTIMATOR | _ESTIMATOR_MODULE,
        absent=_absent(
            _ESTIMATOR_INSIDE,
            "KerasEstimatorParamsReadable",
            "KerasEstimatorParamsReader",
            "KerasEstimatorParamsWritable",
            "KerasEstimatorParamsWriter",
        ),
    ),
    "spark.keras.optimizer": Row(
        absent=_absent(_ESTIMATOR_INSIDE, "serialize_tf_keras_optimizer", "deserialize_tf_keras_optimizer")
    ),
    "spark.keras.remote": Row(absent=_absent(_ESTIMATOR_INSIDE, "RemoteTrainer")),
    "spark.keras.util": Row(absent=_absent(_ESTIMATOR_INSIDE, "BareKerasUtil", "TFKerasUtil")),
    "spark.lightning": Row(names=_LIGHTNING_ESTIMATOR),
    "spark.lightning.datamodule": Row(module="hvd_cluster.estimators.lightning.datamodule"),
    "spark.lightning.estimator": Row(
        names=_LIGHTNING_ESTIMATOR
        | _ESTIMATOR_MODULE
        | _from("hvd_cluster.estimators.horovod_constants", "MIN_PL_VERSION"),
        absent=_absent(
            _ESTIMATOR_INSIDE,
            "TorchEstimatorParamsReadable",
            "TorchEstimatorParamsReader",
            "TorchEstimatorParamsWritable",
            "TorchEstimatorParamsWriter",
            "_torch_param_serialize",
        ),
    ),
    "spark.lightning.legacy": Row(
        absent=_absent("because LightningEstimator trains a plain torch.nn.Module itself", "to_lightning_module")
    ),
    "spark.lightning.remote": Row(absent=_absent(_ESTIMATOR_INSIDE, "RemoteTrainer")),
    "spark.lightning.util": Row(absent=_absent(_ESTIMATOR_INSIDE, "deserialize_fn", "serialize_fn", "save_into_bio")),
    "spark.tensorflow.compute_worker": Row(module="hvd_cluster.spark.compute_worker"),
    "spark.torch": Row(names=_TORCH_ESTIMATOR),
    "spark.torch.datamodule": Row(names=_DATA_MODULES),
    "spark.torch.estimator": Row(
        names=_TORCH_ESTIMATOR | _ESTIMATOR_MODULE,
        absent=_absent(
            _ESTIMATOR_INSIDE,
            "TorchEstimatorParamsReadable",
            "TorchEstimatorParamsReader",
            "TorchEstimatorParamsWritable",
            "TorchEstimatorParamsWriter",
            "_torch_param_serialize",
        ),
    ),
    "spark.torch.remote": Row(absent=_absent(_ESTIMATOR_INSIDE, "RemoteTrainer")),
    "spark.torch.util": Row(absent=_absent(_ESTIMATOR_INSIDE, "deserialize_fn", "serialize_fn", "save_into_bio")),
    "tensorflow": Row(
        module="hvd_cluster.tensorflow",
        names=_TF_PRIVATE | _TF_HELPERS | _TF_AGGREGATION | _from(_COMMON, "is_iterable"),
    ),
    "tensorflow.compression": Row(module="hvd_cluster.tensorflow.compression"),
    "tensorflow.data.compute_service": Row(module="hvd_cluster.tensorflow.data.compute_service"),
    "tensorflow.data.compute_worker": Row(module="hvd_cluster.tensorflow.data.compute_worker"),
    "tensorflow.elastic": Row(
        module="hvd_cluster.tensorflow.elastic", names=_BASICS | _ERRORS | _ELASTIC | _NOTIFICATIONS
    ),
    "tensorflow.functions": Row(
        module="hvd_cluster.tensorflow.functions", names=_BASICS | _PROCESS_SETS | _TF_OPS | _TF_PRIVATE
    ),
    "tensorflow.gradient_aggregation": Row(names=_TF_AGGREGATION | _TF_PRIVATE),
    "tensorflow.gradient_aggregation_eager": Row(names=_TF_AGGREGATION),
    "tensorflow.keras": Row(module="hvd_cluster.keras"),
    "tensorflow.keras.callbacks": Row(module="hvd_cluster.keras.callbacks"),
    "tensorflow.keras.elastic": Row(module="hvd_cluster.keras.elastic"),
    "tensorflow.mpi_ops": Row(
        module="hvd_cluster.tensorflow.ops",
        names=_MPI_OPS | _TF_PRIVATE | _from("hvd_cluster.tensorflow.compression", "Compression"),
        absent=_absent(
            "a gradient function of Horovod's compiled operations: the operations here have their own gradients; wrap "
            "one in tf.custom_gradient to change it",
            *("_allgather_grad", "_allreduce_grad", "_alltoall_grad", "_broadcast_grad", "_reducescatter_grad"),
        )
        | _absent("Horovod's compiled operations: use hvd.allreduce and the others", "MPI_LIB"),
    ),
    "tensorflow.sync_batch_norm": Row(
        module="hvd_cluster.tensorflow.sync_batch_norm", names=_BASICS | _PROCESS_SETS | _TF_OPS | _TF_PRIVATE
    ),
    "tensorflow.util": Row(names=_TF_PRIVATE),
    "torch": Row(module="hvd_cluster.torch", names=_HELPERS | _from(_COMMON, "get_version_mismatch_message")),
    "torch.compression": Row(module="hvd_cluster.torch.compression"),
    "torch.elastic": Row(module="hvd_cluster.torch.elastic", names=_BASICS | _ERRORS | _ELASTIC | _NOTIFICATIONS),
    "torch.elastic.sampler": Row(module="hvd_cluster.torch.elastic.sampler", names=_BASICS),
    "torch.elastic.state": Row(
        module="hvd_cluster.torch.elastic.state", names=_BASICS | _TORCH_OPS | _TORCH_FUNCTIONS | _ELASTIC
    ),
    "torch.functions": Row(module="hvd_cluster.torch.functions", names=_TORCH_COMMON),
    "torch.mpi_ops": Row(
        module="hvd_cluster.torch.ops",
        names=_MPI_OPS | _from("hvd_cluster.torch.compression", "Compression"),
        absent=_absent("Horovod's compiled operations: use hvd.allreduce and the others", "mpi_lib", "mpi_lib_v2"),
    ),
    "torch.optimizer": Row(
        module="hvd_cluster.torch.optimizer",
        names={
            "_DistributedAdasumOptimizer": "hvd_cluster.torch.delta_optimizer:DeltaOptimizer",
            **_TORCH_COMMON,
            **_TORCH_FUNCTIONS,
            **_HELPERS,
        },
    ),
    "torch.sync_batch_norm": Row(
        module="hvd_cluster.torch.sync_batch_norm",
        names={"_SyncBatchNorm": "hvd_cluster.torch.sync_batch_norm:_SyncBatchNormFunction", **_TORCH_COMMON},
    ),
}

_PETASTORM = "hvd_cluster.petastorm"
_PETASTORM_READERS = _from(_PETASTORM, "make_reader", "make_batch_reader")
_CONVERTER = _from("hvd_cluster.petastorm.converter", "SparkDatasetConverter", "make_spark_converter")

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
        names={**_CONVERTER, **_from("hvd_cluster.petastorm.converter", "register_delete_dir_handler")}
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

#: Modules of ours that have moved: their path below ``hvd_cluster`` before -> the path now.
_MOVED = {
    "data.converter": "petastorm.converter",
    "data.petastorm": "petastorm",
    **{
        f"data.petastorm.{module}": f"petastorm.{module}"
        for module in (
            *("cache", "codecs", "errors", "factories", "loaders", "metadata", "predicates", "pytorch", "reader"),
            *("selectors", "spark", "tf_utils", "transform", "unischema", "writer"),
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
    """The row of an old path below the root; an empty row for a package between rows; None for an unknown path."""
    if path in table:
        return table[path]
    return Row() if any(known.startswith(f"{path}.") for known in table) else None


def children_of(path: str, table: Mapping[str, Row] = TABLE) -> set[str]:
    """The names of the modules one step below ``path``."""
    prefix = f"{path}." if path else ""
    return {known[len(prefix) :].split(".")[0] for known in table if known and known.startswith(prefix)}
