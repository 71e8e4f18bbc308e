"""The rows of Horovod's packages that launch workers: ray, runner and spark."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_cluster.oldpaths.rows import BUILT, COMMON, ELASTIC_DRIVER, RUN, Row, absent_names, names_from

_TORCH_ESTIMATOR = names_from("hvd_cluster.estimators", "TorchEstimator", "TorchModel")
_KERAS_ESTIMATOR = names_from("hvd_cluster.estimators", "KerasEstimator", "KerasModel")
_ESTIMATOR_BASES = {
    "HorovodEstimator": "hvd_cluster.estimators.estimator:DistributedEstimator",
    "HorovodModel": "hvd_cluster.estimators.model:FittedModel",
}
# What the three estimators' own modules have beside the estimator and the model.
_ESTIMATOR_MODULE = {
    **_ESTIMATOR_BASES,
    **names_from("hvd_cluster.estimators.params", "EstimatorParams", "ModelParams"),
    **names_from("hvd_cluster.estimators.backend", "SparkBackend"),
    **names_from("hvd_cluster.estimators.prepared_data", "prepare_data"),
}
_SERIALIZATION = {
    "HorovodParamsReader": "hvd_cluster.estimators.stages.persistence:StageReader",
    "HorovodParamsWriter": "hvd_cluster.estimators.stages.persistence:StageWriter",
}
# Horovod's has the name of the one for torch.
_LIGHTNING_ESTIMATOR = {
    "TorchEstimator": "hvd_cluster.estimators.lightning.estimator:HorovodLightningEstimator",
    "LightningEstimator": "hvd_cluster.estimators.lightning.estimator:HorovodLightningEstimator",
    **names_from("hvd_cluster.estimators", "TorchModel"),
}
_DATA_MODULES = names_from("hvd_cluster.estimators.run.data_module", "PetastormDataModule", "NVTabularDataModule")
_LAUNCH = "hvd_cluster.launch.horovod"
_LAUNCHER = "a part of Horovod's launcher: use hvdrun or hvd_cluster.run"
_SERVICES = (
    "a part of Horovod's launcher, whose services talk to each other: use hvd_cluster.run or hvd_cluster.spark.run"
)
_MPI = "because MPI is not used: use hvdrun, or start the script under mpirun or srun as it is"
_STORE = "Horovod's rendezvous server: workers of hvdrun, hvd_cluster.run, Spark and Ray meet by themselves"
_SPARK_INSIDE = "the inside of horovod.spark: use hvd_cluster.spark.run, run_elastic or an estimator"
_ESTIMATOR_INSIDE = (
    "the inside of Horovod's estimators: use the estimator itself, or subclass it (_fit, get_model_class, "
    "_get_model_kwargs, get_prediction_fn)"
)
_STORED_PARAMS = absent_names(
    _ESTIMATOR_INSIDE,
    *("TorchEstimatorParamsReadable", "TorchEstimatorParamsReader", "TorchEstimatorParamsWritable"),
    *("TorchEstimatorParamsWriter", "_torch_param_serialize"),
)

#: Old path below the root -> its row.
LAUNCHERS: Mapping[str, Row] = {
    "ray": Row(module="hvd_cluster.ray"),
    "ray.adapter": Row(module="hvd_cluster.ray.adapter"),
    "ray.driver_service": Row(absent=absent_names(_SERVICES, "_driver_fn")),
    "ray.elastic": Row(module="hvd_cluster.ray.elastic"),
    "ray.elastic_v2": Row(
        names=names_from("hvd_cluster.ray.elastic", "RayHostDiscovery", "TestDiscovery")
        | names_from("hvd_cluster.ray.elastic_adapter", "ElasticAdapter")
    ),
    "ray.ray_logger": Row(module="hvd_cluster.ray.ray_logger"),
    "ray.runner": Row(
        names=names_from("hvd_cluster.ray.executor", "RayExecutor")
        | names_from("hvd_cluster.ray.coordinator", "Coordinator")
        | names_from("hvd_cluster.ray.settings", "MiniSettings", "nics_to_env_var")
        | names_from("hvd_cluster.ray.adapter", "Adapter")
        | names_from("hvd_cluster.ray.static", "StaticAdapter")
        | names_from("hvd_cluster.ray.elastic_adapter", "ElasticAdapter")
        | names_from("hvd_cluster.ray.strategy", "ColocatedStrategy", "PGStrategy")
        | names_from("hvd_cluster.ray.nics", "detect_nics", "map_blocking")
        | names_from("hvd_cluster.ray.worker", "BaseHorovodWorker"),
        absent=absent_names(_STORE, "RendezvousServer"),
    ),
    "ray.strategy": Row(module="hvd_cluster.ray.strategy"),
    "ray.utils": Row(module="hvd_cluster.ray.nics", names=names_from("hvd_cluster.ray.settings", "nics_to_env_var")),
    "ray.worker": Row(module="hvd_cluster.ray.worker"),
    "runner": Row(names=RUN | names_from(f"{_LAUNCH}.arguments", "_HorovodArgs")),
    "runner.common.service.compute_service": Row(
        names=names_from("hvd_cluster.tensorflow.data.registry", "ComputeService", "ComputeClient")
    ),
    "runner.common.service.driver_service": Row(
        absent=absent_names(_SERVICES, "BasicDriverService", "BasicDriverClient", "DriverService", "DriverClient")
    ),
    "runner.common.service.task_service": Row(
        absent=absent_names(_SERVICES, "BasicTaskService", "BasicTaskClient", "TaskService", "TaskClient")
    ),
    "runner.common.util.codec": Row(module=f"{_LAUNCH}.codec"),
    "runner.common.util.config_parser": Row(module=f"{_LAUNCH}.config_parser"),
    "runner.common.util.env": Row(module=f"{_LAUNCH}.variables"),
    "runner.common.util.host_hash": Row(names=names_from(f"{_LAUNCH}.hosts", "host_hash")),
    "runner.common.util.hosts": Row(module=f"{_LAUNCH}.hosts"),
    "runner.common.util.network": Row(
        module=f"{_LAUNCH}.network",
        absent=absent_names(
            _SERVICES,
            *("AckResponse", "AckStreamResponse", "BasicClient", "BasicService", "NoValidAddressesFound"),
            *("PingRequest", "PingResponse", "Wire", "find_port"),
        ),
    ),
    "runner.common.util.safe_shell_exec": Row(
        absent=absent_names("how Horovod's launcher runs a command: use subprocess.run", "execute")
    ),
    "runner.common.util.secret": Row(module=f"{_LAUNCH}.secret"),
    "runner.common.util.settings": Row(names=names_from(f"{_LAUNCH}.settings", "BaseSettings", "Settings")),
    "runner.common.util.timeout": Row(module=f"{_LAUNCH}.timeout"),
    "runner.driver.driver_service": Row(
        absent=absent_names(
            _SERVICES, "HorovodRunDriverClient", "HorovodRunDriverService", "get_common_interfaces", "_run_probe"
        )
    ),
    "runner.elastic.constants": Row(module=f"{_LAUNCH}.elastic_constants"),
    "runner.elastic.discovery": Row(
        module="hvd_cluster.launch.elastic.discovery", absent=absent_names(ELASTIC_DRIVER, "HostManager")
    ),
    "runner.elastic.driver": Row(
        names=names_from(f"{_LAUNCH}.elastic_constants", "DISCOVER_HOSTS_FREQUENCY_SECS", "ELASTIC_TIMEOUT_SECS")
        | names_from("hvd_cluster.launch.elastic.discovery", "FixedHosts", "HostDiscovery", "HostDiscoveryScript"),
        absent=absent_names(ELASTIC_DRIVER, "ElasticDriver", "HostManager", "ResultsRecorder"),
    ),
    "runner.elastic.registration": Row(
        names=names_from(f"{_LAUNCH}.elastic_constants", "FAILURE", "READY", "SUCCESS"),
        absent=absent_names(ELASTIC_DRIVER, "WorkerStateRegistry"),
    ),
    "runner.elastic.rendezvous": Row(absent=absent_names(ELASTIC_DRIVER, "create_rendezvous_handler")),
    "runner.elastic.settings": Row(names=names_from(f"{_LAUNCH}.settings", "ElasticSettings")),
    "runner.elastic.worker": Row(
        names=names_from("hvd_cluster.elastic.state", "HostUpdateResult"),
        absent=absent_names(
            ELASTIC_DRIVER,
            *("HostsUpdatedRequest", "WorkerNotificationClient", "WorkerNotificationManager"),
            "WorkerNotificationService",
        ),
    ),
    "runner.gloo_run": Row(
        absent=absent_names(
            _LAUNCHER, "get_run_command", "gloo_run", "gloo_run_elastic", "launch_gloo", "launch_gloo_elastic"
        )
    ),
    "runner.http.http_client": Row(absent=absent_names(_STORE, "put_data_into_kvstore", "read_data_from_kvstore")),
    "runner.http.http_server": Row(
        absent=absent_names(_STORE, "KVStoreHandler", "KVStoreServer", "RendezvousHandler", "RendezvousServer")
    ),
    "runner.js_run": Row(absent=absent_names(_MPI, "is_jsrun_installed", "js_run")),
    "runner.launch": Row(
        module="hvd_cluster.launch.cli.main",
        names={
            "run_commandline": "hvd_cluster.launch.cli.main:main",
            **names_from(f"{_LAUNCH}.arguments", "_HorovodArgs", "_run", "is_gloo_used"),
            **names_from("hvd_cluster.launch.cli.build", "check_build"),
            **BUILT,
            **names_from(COMMON, "extension_available"),
        },
        absent=absent_names(_LAUNCHER, "run_controller", "gloo_run", "mpi_run", "js_run", "make_override_action"),
    ),
    "runner.mpi_run": Row(
        names=names_from(f"{_LAUNCH}.arguments", "mpi_available"),
        absent=absent_names(_MPI, "_get_mpi_implementation_flags", "get_mpi_implementation", "is_open_mpi", "mpi_run"),
    ),
    "runner.run_task": Row(absent=absent_names(_LAUNCHER, "main")),
    "runner.task_fn": Row(absent=absent_names(_LAUNCHER, "main")),
    "runner.util.cache": Row(absent=absent_names("because nothing is cached about hosts", "Cache", "use_cache")),
    "runner.util.lsf": Row(
        absent=absent_names(
            "because hvdrun finds LSF's hosts itself: start it in the job without -np and -H", "LSFUtils"
        )
    ),
    "runner.util.network": Row(module=f"{_LAUNCH}.network"),
    "runner.util.remote": Row(absent=absent_names(_LAUNCHER, "get_remote_command", "get_ssh_command")),
    "runner.util.threads": Row(module=f"{_LAUNCH}.threads"),
    "spark": Row(module="hvd_cluster.spark"),
    "spark.conf": Row(module="hvd_cluster.spark.conf"),
    "spark.driver.driver_service": Row(absent=absent_names(_SPARK_INSIDE, "SparkDriverClient", "SparkDriverService")),
    "spark.driver.host_discovery": Row(absent=absent_names(_SPARK_INSIDE, "SparkDriverHostDiscovery")),
    "spark.driver.rsh": Row(absent=absent_names(_SPARK_INSIDE, "rsh")),
    "spark.gloo_run": Row(absent=absent_names(_SPARK_INSIDE, "gloo_run", "gloo_run_elastic")),
    "spark.mpi_run": Row(absent=absent_names(_SPARK_INSIDE, "mpi_run")),
    "spark.runner": Row(names=names_from("hvd_cluster.spark", "run", "run_elastic")),
    "spark.task": Row(names=names_from("hvd_cluster.spark.devices", "get_available_devices")),
    "spark.task.gloo_exec_fn": Row(absent=absent_names(_SPARK_INSIDE, "main")),
    "spark.task.task_service": Row(absent=absent_names(_SPARK_INSIDE, "SparkTaskClient", "SparkTaskService")),
    "spark.common.backend": Row(module="hvd_cluster.estimators.backend"),
    "spark.common.cache": Row(
        absent=absent_names("because fits share no prepared data: use fit_on_parquet to reuse it", "TrainingDataCache")
    ),
    "spark.common.constants": Row(module="hvd_cluster.estimators.horovod_constants"),
    "spark.common.estimator": Row(names=_ESTIMATOR_BASES),
    "spark.common.serialization": Row(names=_SERIALIZATION),
    "spark.common.store": Row(
        module="hvd_cluster.data.store",
        names=names_from("hvd_cluster.data.files.store_families", "HDFSStore", "DBFSLocalStore"),
    ),
    "spark.common.datamodule": Row(module="hvd_cluster.estimators.run.data_module"),
    "spark.common.params": Row(names=names_from("hvd_cluster.estimators.params", "EstimatorParams", "ModelParams")),
    "spark.common.util": Row(
        module="hvd_cluster.estimators.prepared_data", names=names_from(f"{_LAUNCH}.hosts", "host_hash")
    ),
    "spark.data_loaders.pytorch_data_loaders": Row(module="hvd_cluster.petastorm.loaders"),
    "spark.keras": Row(names=_KERAS_ESTIMATOR),
    "spark.keras.datamodule": Row(names=_DATA_MODULES),
    "spark.keras.estimator": Row(
        names=_KERAS_ESTIMATOR | _ESTIMATOR_MODULE,
        absent=absent_names(
            _ESTIMATOR_INSIDE,
            "KerasEstimatorParamsReadable",
            "KerasEstimatorParamsReader",
            "KerasEstimatorParamsWritable",
            "KerasEstimatorParamsWriter",
        ),
    ),
    "spark.keras.optimizer": Row(
        absent=absent_names(_ESTIMATOR_INSIDE, "serialize_tf_keras_optimizer", "deserialize_tf_keras_optimizer")
    ),
    "spark.keras.remote": Row(absent=absent_names(_ESTIMATOR_INSIDE, "RemoteTrainer")),
    "spark.keras.util": Row(absent=absent_names(_ESTIMATOR_INSIDE, "BareKerasUtil", "TFKerasUtil")),
    "spark.lightning": Row(names=_LIGHTNING_ESTIMATOR),
    "spark.lightning.datamodule": Row(module="hvd_cluster.estimators.lightning.datamodule"),
    "spark.lightning.estimator": Row(
        names=_LIGHTNING_ESTIMATOR
        | _ESTIMATOR_MODULE
        | names_from("hvd_cluster.estimators.horovod_constants", "MIN_PL_VERSION"),
        absent=_STORED_PARAMS,
    ),
    "spark.lightning.legacy": Row(
        absent=absent_names("because LightningEstimator trains a plain torch.nn.Module itself", "to_lightning_module")
    ),
    "spark.lightning.remote": Row(absent=absent_names(_ESTIMATOR_INSIDE, "RemoteTrainer")),
    "spark.lightning.util": Row(
        absent=absent_names(_ESTIMATOR_INSIDE, "deserialize_fn", "serialize_fn", "save_into_bio")
    ),
    "spark.tensorflow.compute_worker": Row(module="hvd_cluster.spark.compute_worker"),
    "spark.torch": Row(names=_TORCH_ESTIMATOR),
    "spark.torch.datamodule": Row(names=_DATA_MODULES),
    "spark.torch.estimator": Row(
        names=_TORCH_ESTIMATOR | _ESTIMATOR_MODULE,
        absent=_STORED_PARAMS,
    ),
    "spark.torch.remote": Row(absent=absent_names(_ESTIMATOR_INSIDE, "RemoteTrainer")),
    "spark.torch.util": Row(absent=absent_names(_ESTIMATOR_INSIDE, "deserialize_fn", "serialize_fn", "save_into_bio")),
}
