# ruff: noqa: B006 - the defaults are shown to people and never used
"""The constructors of estimators and models; nothing here runs.

For editors and type checkers. Generated from the tables of params by tests/house/typed_params.py, and checked against
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from hvd_cluster.data.store import Store
    from hvd_cluster.estimators.backend import Backend
    from hvd_cluster.estimators.run.early_stopping import EarlyStopping
    from hvd_cluster.estimators.torch.strategies.communication import DiLoCo, LocalSGD, PowerSGD
    from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2

    class Index(Protocol):
        """An index or array of pandas or NumPy."""

        def tolist(self) -> Any: ...

    Callback = Callable[..., Any]
    Columns = str | Sequence[str] | Index


class TorchEstimatorParams:
    """The constructor of :class:`TorchEstimator`."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            num_proc: int | None = None,
            store: Store | str | os.PathLike[str] | None = None,
            backend: Backend | str | None = None,
            model: Any = None,
            optimizer: Any = None,
            loss: Callback | Sequence[Callback] | None = None,
            metrics: Sequence[Callback | Sequence[Callback]] | Mapping[str, Callback | Sequence[Callback]] | None = [],
            loss_weights: Sequence[float] | None = None,
            sample_weight_col: str | None = None,
            feature_cols: Columns | None = None,
            label_cols: Columns | None = None,
            continuous_cols: Columns | None = None,
            categorical_cols: Columns | None = None,
            validation: float | str | None = None,
            callbacks: Sequence[Any] | None = [],
            driver_callbacks: Sequence[Callback | Sequence[Callback]] | None = [],
            batch_size: int | None = 32,
            val_batch_size: int | None = None,
            epochs: int | None = 1,
            verbose: int | None = 1,
            gradient_compression: Any = None,
            compress_sparse_cols: bool | None = False,
            random_seed: int | None = None,
            shuffle_buffer_size: Any = None,
            shuffle: bool | None = True,
            partitions_per_process: int | None = 10,
            run_id: str | None = None,
            train_steps_per_epoch: int | None = None,
            validation_steps_per_epoch: int | None = None,
            transformation_fn: Callback | None = None,
            transformation_edit_fields: Sequence[Any] | None = None,
            transformation_removed_fields: Columns | None = None,
            preprocess: Callback | None = None,
            batch_format: Literal["numpy", "pyarrow"] | None = "numpy",
            on_error: Literal["raise", "skip", "null"] | None = "raise",
            train_reader_num_workers: int | None = 2,
            val_reader_num_workers: int | None = 2,
            tensorflow_dataset_prefetch_buffer_size: int | None = 0,
            reader_pool_type: Literal["thread", "process", "dummy"] | None = "thread",
            label_shapes: Sequence[Sequence[int]] | None = None,
            inmemory_cache_all: bool | None = False,
            use_gpu: bool | None = True,
            mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None,
            backward_passes_per_step: int | None = 1,
            scale_lr: bool | None = True,
            data_module: Callback | None = None,
            terminate_on_nan: bool | None = True,
            max_restarts: int | None = 3,
            checkpoint_every_epochs: int | None = 1,
            checkpoint_every_steps: int | None = None,
            output_cols: Columns | None = None,
            output_kinds: str | Sequence[str] | None = None,
            mlflow: bool | str | None = None,
            input_shapes: Sequence[Sequence[int]] | None = None,
            output_fn: Callback | None = None,
            loss_constructors: Callback | Sequence[Callback] | None = None,
            train_minibatch_fn: Callback | None = None,
            validation_minibatch_fn: Callback | None = None,
            lr_scheduler: Callback | None = None,
            lr_scheduler_interval: Literal["epoch", "step"] | None = "epoch",
            gradient_clip_norm: float | None = None,
            gradient_clip_value: float | None = None,
            torch_backend: str | None = None,
            sharding: Literal["none", "zero1", "fsdp2"] | FSDP2 | None = "none",
            communication: Literal["every_step"] | PowerSGD | LocalSGD | DiLoCo | None = "every_step",
            mixed_precision: Literal["bf16", "fp16"] | None = None,
            class_weights: Literal["balanced"] | Mapping[float, float] | None = None,
            early_stopping: EarlyStopping | int | None = None,
            return_best: bool | None = False,
            weightCol: str | None = ...,
            featuresCol: Columns | None = ...,
            labelCol: Columns | None = ...,
            validationIndicatorCol: float | str | None = ...,
            predictionCol: Columns | None = ...,
        ) -> None: ...


class LightningEstimatorParams:
    """The constructor of :class:`LightningEstimator`."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            num_proc: int | None = None,
            store: Store | str | os.PathLike[str] | None = None,
            backend: Backend | str | None = None,
            model: Any = None,
            optimizer: Any = None,
            loss: Callback | Sequence[Callback] | None = None,
            metrics: Sequence[Callback | Sequence[Callback]] | Mapping[str, Callback | Sequence[Callback]] | None = [],
            loss_weights: Sequence[float] | None = None,
            sample_weight_col: str | None = None,
            feature_cols: Columns | None = None,
            label_cols: Columns | None = None,
            continuous_cols: Columns | None = None,
            categorical_cols: Columns | None = None,
            validation: float | str | None = None,
            callbacks: Sequence[Any] | None = [],
            driver_callbacks: Sequence[Callback | Sequence[Callback]] | None = [],
            batch_size: int | None = 32,
            val_batch_size: int | None = None,
            epochs: int | None = 1,
            verbose: int | None = 1,
            gradient_compression: Any = None,
            compress_sparse_cols: bool | None = False,
            random_seed: int | None = None,
            shuffle_buffer_size: Any = None,
            shuffle: bool | None = True,
            partitions_per_process: int | None = 10,
            run_id: str | None = None,
            train_steps_per_epoch: int | None = None,
            validation_steps_per_epoch: int | None = None,
            transformation_fn: Callback | None = None,
            transformation_edit_fields: Sequence[Any] | None = None,
            transformation_removed_fields: Columns | None = None,
            preprocess: Callback | None = None,
            batch_format: Literal["numpy", "pyarrow"] | None = "numpy",
            on_error: Literal["raise", "skip", "null"] | None = "raise",
            train_reader_num_workers: int | None = 2,
            val_reader_num_workers: int | None = 2,
            tensorflow_dataset_prefetch_buffer_size: int | None = 0,
            reader_pool_type: Literal["thread", "process", "dummy"] | None = "thread",
            label_shapes: Sequence[Sequence[int]] | None = None,
            inmemory_cache_all: bool | None = False,
            use_gpu: bool | None = True,
            mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None,
            backward_passes_per_step: int | None = 1,
            scale_lr: bool | None = False,
            data_module: Callback | None = None,
            terminate_on_nan: bool | None = True,
            max_restarts: int | None = 3,
            checkpoint_every_epochs: int | None = 1,
            checkpoint_every_steps: int | None = None,
            output_cols: Columns | None = None,
            output_kinds: str | Sequence[str] | None = None,
            mlflow: bool | str | None = None,
            input_shapes: Sequence[Sequence[int]] | None = None,
            loss_constructors: Callback | Sequence[Callback] | None = None,
            output_fn: Callback | None = None,
            train_minibatch_fn: Callback | None = None,
            num_gpus: int | None = None,
            torch_backend: str | None = None,
            sharding: Literal["none", "zero1", "fsdp2"] | FSDP2 | None = "none",
            communication: Literal["every_step"] | PowerSGD | LocalSGD | DiLoCo | None = "every_step",
            logger: Any = None,
            log_every_n_steps: int | None = 50,
            profiler: Any = None,
            trainer_args: Mapping[str, Any] | None = None,
            loader_num_epochs: int | None = None,
            debug_data_loader: bool | None = False,
            train_async_data_loader_queue_size: float | None = None,
            val_async_data_loader_queue_size: float | None = None,
            weightCol: str | None = ...,
            featuresCol: Columns | None = ...,
            labelCol: Columns | None = ...,
            validationIndicatorCol: float | str | None = ...,
            predictionCol: Columns | None = ...,
        ) -> None: ...


class KerasEstimatorParams:
    """The constructor of :class:`KerasEstimator`."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            num_proc: int | None = None,
            store: Store | str | os.PathLike[str] | None = None,
            backend: Backend | str | None = None,
            model: Any = None,
            optimizer: Any = None,
            loss: Any = None,
            metrics: Any = [],
            loss_weights: Sequence[float] | None = None,
            sample_weight_col: str | None = None,
            feature_cols: Columns | None = None,
            label_cols: Columns | None = None,
            continuous_cols: Columns | None = None,
            categorical_cols: Columns | None = None,
            validation: float | str | None = None,
            callbacks: Sequence[Any] | None = [],
            driver_callbacks: Sequence[Callback | Sequence[Callback]] | None = [],
            batch_size: int | None = 32,
            val_batch_size: int | None = None,
            epochs: int | None = 1,
            verbose: int | None = 1,
            gradient_compression: Any = None,
            compress_sparse_cols: bool | None = False,
            random_seed: int | None = None,
            shuffle_buffer_size: Any = None,
            shuffle: bool | None = True,
            partitions_per_process: int | None = 10,
            run_id: str | None = None,
            train_steps_per_epoch: int | None = None,
            validation_steps_per_epoch: int | None = None,
            transformation_fn: Callback | None = None,
            transformation_edit_fields: Sequence[Any] | None = None,
            transformation_removed_fields: Columns | None = None,
            preprocess: Callback | None = None,
            batch_format: Literal["numpy", "pyarrow"] | None = "numpy",
            on_error: Literal["raise", "skip", "null"] | None = "raise",
            train_reader_num_workers: int | None = 2,
            val_reader_num_workers: int | None = 2,
            tensorflow_dataset_prefetch_buffer_size: int | None = 0,
            reader_pool_type: Literal["thread", "process", "dummy"] | None = "thread",
            label_shapes: Sequence[Sequence[int]] | None = None,
            inmemory_cache_all: bool | None = False,
            use_gpu: bool | None = True,
            mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None,
            backward_passes_per_step: int | None = 1,
            scale_lr: bool | None = True,
            data_module: Callback | None = None,
            terminate_on_nan: bool | None = True,
            max_restarts: int | None = 3,
            checkpoint_every_epochs: int | None = 1,
            checkpoint_every_steps: int | None = None,
            output_cols: Columns | None = None,
            output_kinds: str | Sequence[str] | None = None,
            mlflow: bool | str | None = None,
            custom_objects: Mapping[str, Any] | None = {},
            checkpoint_callback: Any = None,
            backend_env: Mapping[str, Any] | None = {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"},
            weightCol: str | None = ...,
            featuresCol: Columns | None = ...,
            labelCol: Columns | None = ...,
            validationIndicatorCol: float | str | None = ...,
            predictionCol: Columns | None = ...,
        ) -> None: ...


class TorchModelParams:
    """The constructor of :class:`TorchModel`."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            history: Sequence[Mapping[str, Any]] | None = None,
            model: Any = None,
            feature_columns: Columns | None = None,
            label_columns: Columns | None = None,
            output_cols: Columns | None = None,
            output_kinds: str | Sequence[str] | None = None,
            batch_size: int | None = 1024,
            transformation_fn: Callback | None = None,
            preprocess: Callback | None = None,
            batch_format: Literal["numpy", "pyarrow"] | None = "numpy",
            on_error: Literal["raise", "skip", "null"] | None = "raise",
            run_id: str | None = None,
            _metadata: Mapping[str, Any] | None = None,
            optimizer: Any = None,
            loss: Any = None,
            loss_constructors: Any = None,
            output_fn: Callback | None = None,
            input_shapes: Sequence[Sequence[int]] | None = None,
            model_factory: Any = None,
            featuresCol: Columns | None = ...,
            labelCol: Columns | None = ...,
            outputCols: Columns | None = ...,
            predictionCol: Columns | None = ...,
        ) -> None: ...


class KerasModelParams:
    """The constructor of :class:`KerasModel`."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            history: Sequence[Mapping[str, Any]] | None = None,
            model: Any = None,
            feature_columns: Columns | None = None,
            label_columns: Columns | None = None,
            output_cols: Columns | None = None,
            output_kinds: str | Sequence[str] | None = None,
            batch_size: int | None = 1024,
            transformation_fn: Callback | None = None,
            preprocess: Callback | None = None,
            batch_format: Literal["numpy", "pyarrow"] | None = "numpy",
            on_error: Literal["raise", "skip", "null"] | None = "raise",
            run_id: str | None = None,
            _metadata: Mapping[str, Any] | None = None,
            custom_objects: Mapping[str, Any] | None = {},
            model_factory: Any = None,
            _floatx: str | None = None,
            featuresCol: Columns | None = ...,
            labelCol: Columns | None = ...,
            outputCols: Columns | None = ...,
            predictionCol: Columns | None = ...,
        ) -> None: ...
