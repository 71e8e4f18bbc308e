"""The rows of Horovod's packages for frameworks.

They are common, data, keras, mxnet, tensorflow and torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_cluster.oldpaths.rows import BUILT, COMMON, ELASTIC_DRIVER, Row, absent_names, names_from

_BASICS = names_from(
    "hvd_cluster.engine.basics",
    *("init", "shutdown", "is_initialized", "is_homogeneous", "rank", "size", "local_rank", "local_size"),
    *("cross_rank", "cross_size", "start_timeline", "stop_timeline", "ccl_built", "cuda_built", "ddl_built"),
    *("gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rocm_built"),
)
_PROCESS_SETS = names_from(
    "hvd_cluster.engine.process_sets", "ProcessSet", "global_process_set", "add_process_set", "remove_process_set"
)
_ERRORS = names_from("hvd_cluster.errors", "HorovodInternalError", "HostsUpdatedInterrupt")
_HELPERS = names_from(
    COMMON,
    "check_extension",
    "check_installed_version",
    "extension_available",
    "gpu_available",
    "is_version_greater_equal_than",
    "num_rank_is_power_2",
    "split_list",
)
_MPI_OPS = _BASICS | _PROCESS_SETS | _ERRORS | _HELPERS | names_from(COMMON, "HorovodBasics", "_basics")
_TORCH_OPS = names_from(
    "hvd_cluster.torch.ops",
    *("Adasum", "Average", "Sum", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async"),
    *("allreduce_async_", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allreduce_async_"),
    *("poll", "sparse_allreduce_async", "synchronize"),
)
_TORCH_FUNCTIONS = names_from(
    "hvd_cluster.torch.functions",
    *("allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"),
)
_TORCH_COMMON = (
    _BASICS | _PROCESS_SETS | _ERRORS | _TORCH_OPS | names_from("hvd_cluster.torch.compression", "Compression")
)
_TF_PRIVATE = names_from(
    "hvd_cluster.tensorflow.horovod_names",
    *("_allreduce", "_cache", "_executing_eagerly", "_grouped_allreduce", "_grouped_reducescatter"),
    *("_LegacyOptimizer", "_make_subgraph", "_normalize_name", "_reducescatter", "_SessionRunHook", "refs_to_vars"),
    "vars_to_refs",
)
_TF_HELPERS = {"check_num_rank_power_of_2": f"{COMMON}:num_rank_is_power_2", **_HELPERS}
_TF_AGGREGATION = names_from(
    "hvd_cluster.tensorflow.horovod_names", "LocalGradientAggregationHelper", "LocalGradientAggregationHelperEager"
)
_TF_OPS = names_from(
    "hvd_cluster.tensorflow.ops",
    *("Adasum", "Average", "Sum", "allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "rank_op"),
    *("broadcast_variables", "reducescatter", "size_op"),
)
_ELASTIC = {
    **names_from("hvd_cluster.elastic.state", "HostUpdateResult", "ObjectState", "State"),
    **names_from("hvd_cluster.elastic.loop", "run_fn"),
}
_LOADERS = names_from("hvd_cluster.data.loaders", "BaseDataLoader", "AsyncDataLoaderMixin")
_KERAS_BACKED = "the inside of horovod.keras: use the name without _keras and Impl, in hvd_cluster.keras"
_NOTIFICATIONS = {"notification_manager": "hvd_cluster.elastic.notification:notifications"}

#: Old path below the root -> its row.
FRAMEWORKS: Mapping[str, Row] = {
    "common.basics": Row(module="hvd_cluster.engine.basics", names=names_from(COMMON, "HorovodBasics")),
    "common.elastic": Row(
        module="hvd_cluster.elastic.state",
        names=names_from("hvd_cluster.elastic.loop", "run_fn") | _NOTIFICATIONS | _ERRORS,
        absent=absent_names(ELASTIC_DRIVER, "WorkerNotificationManager"),
    ),
    "common.exceptions": Row(
        names=names_from(
            "hvd_cluster.errors", "HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"
        )
        | names_from(COMMON, "get_version_mismatch_message")
    ),
    "common.process_sets": Row(
        module="hvd_cluster.engine.process_sets", names=names_from(COMMON, "HorovodBasics", "_temp_process_set_object")
    ),
    "common.util": Row(names=BUILT | _HELPERS | names_from(COMMON, "env", "is_iterable")),
    "data": Row(names=_LOADERS),
    "data.data_loader_base": Row(names=_LOADERS),
    "keras": Row(module="hvd_cluster.keras"),
    "keras.callbacks": Row(module="hvd_cluster.keras.callbacks"),
    "keras.elastic": Row(module="hvd_cluster.keras.elastic"),
    "_keras": Row(
        names=names_from("hvd_cluster.keras", "DistributedOptimizer", "load_model"),
        absent=absent_names(_KERAS_BACKED, "create_distributed_optimizer"),
    ),
    "_keras.callbacks": Row(
        module="hvd_cluster.keras.callbacks",
        absent=absent_names(
            _KERAS_BACKED,
            "BroadcastGlobalVariablesCallbackImpl",
            "MetricAverageCallbackImpl",
            "LearningRateScheduleCallbackImpl",
            "LearningRateWarmupCallbackImpl",
        ),
    ),
    "_keras.elastic": Row(
        module="hvd_cluster.keras.elastic",
        absent=absent_names(
            _KERAS_BACKED, "CommitStateCallbackImpl", "UpdateBatchStateCallbackImpl", "UpdateEpochStateCallbackImpl"
        ),
    ),
    "mxnet": Row(module="hvd_cluster.mxnet"),
    "mxnet.compression": Row(module="hvd_cluster.mxnet.compression"),
    "mxnet.functions": Row(module="hvd_cluster.mxnet.functions"),
    "mxnet.mpi_ops": Row(module="hvd_cluster.mxnet.ops", names=_MPI_OPS),
    "tensorflow": Row(
        module="hvd_cluster.tensorflow",
        names={
            "_DistributedOptimizer": "hvd_cluster.tensorflow.optimizer:_DistributedV1Optimizer",
            **_TF_PRIVATE,
            **_TF_HELPERS,
            **_TF_AGGREGATION,
            **names_from(COMMON, "is_iterable"),
        },
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
        names=_MPI_OPS | _TF_PRIVATE | names_from("hvd_cluster.tensorflow.compression", "Compression"),
        absent=absent_names(
            "a gradient function of Horovod's compiled operations: the operations here have their own gradients; wrap "
            "one in tf.custom_gradient to change it",
            *("_allgather_grad", "_allreduce_grad", "_alltoall_grad", "_broadcast_grad", "_reducescatter_grad"),
        )
        | absent_names("Horovod's compiled operations: use hvd.allreduce and the others", "MPI_LIB"),
    ),
    "tensorflow.sync_batch_norm": Row(
        module="hvd_cluster.tensorflow.sync_batch_norm", names=_BASICS | _PROCESS_SETS | _TF_OPS | _TF_PRIVATE
    ),
    "tensorflow.util": Row(names=_TF_PRIVATE),
    "torch": Row(
        module="hvd_cluster.torch",
        names={
            **names_from("hvd_cluster.torch.optimizer", "_DistributedOptimizer"),
            **_HELPERS,
            **names_from(COMMON, "get_version_mismatch_message"),
        },
    ),
    "torch.compression": Row(module="hvd_cluster.torch.compression"),
    "torch.elastic": Row(module="hvd_cluster.torch.elastic", names=_BASICS | _ERRORS | _ELASTIC | _NOTIFICATIONS),
    "torch.elastic.sampler": Row(module="hvd_cluster.torch.elastic.sampler", names=_BASICS),
    "torch.elastic.state": Row(
        module="hvd_cluster.torch.elastic.state", names=_BASICS | _TORCH_OPS | _TORCH_FUNCTIONS | _ELASTIC
    ),
    "torch.functions": Row(module="hvd_cluster.torch.functions", names=_TORCH_COMMON),
    "torch.mpi_ops": Row(
        module="hvd_cluster.torch.ops",
        names=_MPI_OPS | names_from("hvd_cluster.torch.compression", "Compression"),
        absent=absent_names("Horovod's compiled operations: use hvd.allreduce and the others", "mpi_lib", "mpi_lib_v2"),
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
