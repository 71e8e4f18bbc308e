from __future__ import annotations

import inspect
import pickle
import warnings

import pytest
import torch

from hvd_cluster.estimators import KerasEstimator, KerasModel, LightningEstimator, TorchEstimator, TorchModel
from hvd_cluster.estimators.params import EstimatorParams, ModelParams


def test_every_param_has_a_setter_that_returns_the_stage_and_a_getter():
    net = torch.nn.Linear(2, 1)
    estimator = TorchEstimator()
    for name, value in {"Model": net, "Epochs": 3, "BatchSize": 7, "FeatureCols": ["a"], "LabelCols": ["b"]}.items():
        assert getattr(estimator, f"set{name}")(value) is estimator
        assert getattr(estimator, f"get{name}")() == value
    for row in TorchEstimator.param_rows.values():
        assert estimator.hasDefault(row.key)


def test_horovods_irregular_accessors_exist():
    estimator = TorchEstimator()
    with pytest.warns(DeprecationWarning, match="no effect"):
        estimator.setShufflingBufferSize(10)
    assert estimator.getShufflingBufferSize() == 10
    assert estimator.setTrainReaderNumWorker(3).getTrainReaderNumWorkers() == 3
    assert estimator.setValReaderNumWorker(4).getValReaderNumWorkers() == 4
    assert estimator.setInMemoryCacheAll(False).getInMemoryCacheAll() is False
    for name in ("setUseGpu", "setMpStartMethod", "setBackwardPassesPerStep"):
        value = {"setUseGpu": False, "setMpStartMethod": "spawn", "setBackwardPassesPerStep": 2}[name]
        assert getattr(estimator, name)(value) is estimator
    model = TorchModel()
    assert model.setLabelColoumns(["y"]).getLabelColumns() == ["y"]
    assert model.setLabelColumns(["z"]).getLabelColumns() == ["z"]


def test_defaults_are_horovods():
    estimator = TorchEstimator()
    defaults = {
        "num_proc": None,
        "batch_size": 32,
        "epochs": 1,
        "verbose": 1,
        "validation": None,
        "metrics": [],
        "shuffle": True,
        "partitions_per_process": 10,
        "train_reader_num_workers": 2,
        "reader_pool_type": "thread",
        "use_gpu": True,
        "backward_passes_per_step": 1,
        "scale_lr": True,
    }
    assert {name: estimator.getOrDefault(name) for name in defaults} == defaults
    assert estimator.getMetrics() is not TorchEstimator().getMetrics()


def test_the_signature_shows_every_param():
    keywords = inspect.signature(TorchEstimator).parameters
    assert keywords["batch_size"].default == 32
    assert all(each.kind is each.KEYWORD_ONLY for each in keywords.values())
    assert "sample_weight_col" in (TorchEstimator.__doc__ or "")


def test_wrong_values_are_reported_all_at_once():
    with pytest.raises(ValueError, match="num_proc=0 must be") as caught:
        TorchEstimator(num_proc=0, epochs=-1, validation=1.5, batch_size=None, mp_start_method="thread")
    for text in ("epochs=-1", "validation=1.5", "'fork', 'spawn', 'forkserver'"):
        assert text in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("epochs", "three"), ("epochs", True), ("feature_cols", []), ("loss", 3)])
def test_a_setter_rejects_a_wrong_value(name, value):
    setter = getattr(TorchEstimator(), "set" + "".join(part.capitalize() for part in name.split("_")))
    with pytest.raises(ValueError, match=f"{name}="):
        setter(value)


def test_none_stands_for_the_default():
    estimator = TorchEstimator(batch_size=None, verbose=None, loss=None)
    assert (estimator.getBatchSize(), estimator.getVerbose(), estimator.getLoss()) == (32, 1, None)
    assert estimator.setEpochs(5).setEpochs(None).getEpochs() == 1
    assert estimator.setParams(shuffle=None).getShuffle() is True


def test_an_unknown_param_is_a_type_error_with_a_suggestion():
    with pytest.raises(TypeError, match=r"no param 'epoch' \(did you mean epochs"):
        TorchEstimator(epoch=3)
    with pytest.raises(TypeError, match=r"no param 'num_procs' \(did you mean num_proc\?\)"):
        TorchEstimator(num_procs=2)
    with pytest.raises(TypeError, match=r"no param 'num_workers' \(did you mean num_proc"):
        TorchEstimator(num_workers=3)


def test_numpy_numbers_and_tuples_become_plain_values():
    import numpy as np
    import pandas as pd

    estimator = TorchEstimator(epochs=np.int64(4), feature_cols="x", input_shapes=((-1, 2),))
    assert type(estimator.getEpochs()) is int
    assert estimator.getFeatureCols() == ["x"]
    assert estimator.getInputShapes() == [[-1, 2]]
    estimator = TorchEstimator(
        validation=np.float32(0.25), gradient_clip_norm=np.int64(2), feature_cols=np.array(["x"])
    )
    assert (estimator.getValidation(), estimator.getGradientClipNorm()) == (0.25, 2.0)
    assert estimator.getFeatureCols() == ["x"]
    assert TorchEstimator(feature_cols=pd.Index(["a", "b", "y"]).drop("y")).getFeatureCols() == ["a", "b"]


def test_copy_and_explain_params_work_as_in_spark_ml():
    estimator = TorchEstimator(epochs=3)
    other = estimator.copy({estimator.batch_size: 5})
    assert (other.uid, other.getEpochs(), other.getBatchSize(), estimator.getBatchSize()) == (estimator.uid, 3, 5, 32)
    assert "epochs: passes over" in estimator.explainParams()
    assert "current: 3" in estimator.explainParam("epochs")
    assert estimator.isSet("epochs")
    assert not estimator.isSet("batch_size")
    assert estimator.extractParamMap()[estimator.epochs] == 3


@pytest.mark.parametrize("cls", [TorchEstimator, TorchModel, KerasEstimator, KerasModel, LightningEstimator])
def test_stages_are_pickled_with_their_values(cls):
    stage = cls(run_id="mine")
    again = pickle.loads(pickle.dumps(stage))
    assert (again.uid, again.getRunId()) == (stage.uid, "mine")
    with pytest.raises(ValueError, match="batch_size=0 must be a whole number"):
        again.setBatchSize(0)


def test_a_subclass_may_add_params_like_synapse_ml():
    from hvd_cluster.estimators.stages.spark_ml import Param, Params

    class Vision(TorchEstimator):
        backbone = Param(Params._dummy(), "backbone", "name of the backbone")

        def __init__(self, **kwargs):
            super().__init__()
            self._setDefault(backbone="resnet18", feature_cols=["image"])
            self._set(**kwargs)

    estimator = Vision(backbone="resnet50", epochs=2)
    assert estimator.getOrDefault(estimator.backbone) == "resnet50"
    assert (estimator.getEpochs(), estimator.getFeatureCols()) == (2, ["image"])


def test_importing_the_package_gives_no_warning_and_loads_no_framework():
    import subprocess
    import sys

    code = "import sys, hvd_cluster.estimators; print([m for m in ('torch', 'pyspark', 'pyarrow') if m in sys.modules])"
    with warnings.catch_warnings():
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Horovod's params of every estimator: keyword -> what follows get and set, if not the name in camel case.
HOROVODS_PARAMS = {
    "num_proc": (), "store": (), "backend": (), "model": (), "optimizer": (), "loss": (), "metrics": (),
    "loss_weights": (), "sample_weight_col": (), "feature_cols": (), "label_cols": (), "continuous_cols": (),
    "categorical_cols": (), "validation": (), "callbacks": (), "batch_size": (), "val_batch_size": (), "epochs": (),
    "verbose": (), "gradient_compression": (), "compress_sparse_cols": (), "random_seed": (),
    "shuffle_buffer_size": ("ShufflingBufferSize",), "shuffle": (), "partitions_per_process": (), "run_id": (),
    "train_steps_per_epoch": (), "validation_steps_per_epoch": (), "transformation_fn": (),
    "transformation_edit_fields": (), "transformation_removed_fields": (),
    "train_reader_num_workers": ("TrainReaderNumWorker",), "val_reader_num_workers": ("ValReaderNumWorker",),
    "reader_pool_type": (), "label_shapes": (), "inmemory_cache_all": ("InMemoryCacheAll",), "use_gpu": (),
    "mp_start_method": (), "backward_passes_per_step": (), "tensorflow_dataset_prefetch_buffer_size": (),
}  # fmt: skip
OF_TORCH = {"data_module": (), "input_shapes": (), "loss_constructors": (), "train_minibatch_fn": ()}
OF_LIGHTNING = {
    **OF_TORCH, "num_gpus": ("NumGPUs",), "logger": (), "log_every_n_steps": (), "loader_num_epochs": (),
    "terminate_on_nan": (), "profiler": (), "trainer_args": (), "debug_data_loader": (),
    "train_async_data_loader_queue_size": (), "val_async_data_loader_queue_size": (),
}  # fmt: skip
OF_KERAS = {"custom_objects": (), "checkpoint_callback": (), "data_module": (), "backend_env": ()}
OF_MODELS = {
    "history": (), "model": (), "feature_columns": (), "label_columns": (), "outputCols": ("OutputCols",),
    "run_id": (),
}  # fmt: skip
OF_TORCH_MODELS = {"optimizer": (), "loss": (), "loss_constructors": (), "input_shapes": ()}


@pytest.mark.parametrize(
    ("stage", "params"),
    [
        (EstimatorParams, HOROVODS_PARAMS),
        (TorchEstimator, HOROVODS_PARAMS | OF_TORCH),
        (LightningEstimator, HOROVODS_PARAMS | OF_LIGHTNING),
        (KerasEstimator, HOROVODS_PARAMS | OF_KERAS),
        (ModelParams, OF_MODELS),
        (TorchModel, OF_MODELS | OF_TORCH_MODELS),
        (KerasModel, OF_MODELS | {"custom_objects": ()}),
    ],
)
def test_each_param_of_horovod_has_its_name_and_its_accessors(stage, params):
    made = stage()
    wrong = [name for name in params if not made.hasParam(name) or made.getParam(name).name != name]
    assert wrong == []
    for name, spellings in params.items():
        made._setDefault(**{name: None})
        made._set(**{name: None})
        for spelling in spellings or ("".join(part.capitalize() for part in name.split("_")),):
            setter = "LabelColoumns" if name == "label_columns" else spelling
            assert callable(getattr(made, f"get{spelling}")), spelling
            assert callable(getattr(made, f"set{setter}")), setter


def test_output_cols_and_history_have_horovods_names_and_our_older_ones():
    model = TorchModel(label_columns=["y"], outputCols=["theirs"])
    assert model.getOutputCols() == TorchModel(output_cols="theirs").getOutputCols() == ["theirs"]
    assert model.output_cols is model.outputCols is model.getParam("output_cols") is model.getParam("outputCols")
    assert model.copy({model.outputCols: ["a"]}).getOutputCols() == ["a"]
    assert TorchModel()._setDefault(outputCols=["z"]).getOutputCols() == ["z"]
    records = [{"epoch": 0, "train": {"loss": 1.0}}]
    assert model.copy({model.getParam("history"): records}).getHistory() == records
    assert model._setDefault(history=records).getOrDefault("history") == records
    assert list(model.history["train_loss"]) == [1.0]
    assert KerasModel(_floatx="float64")._get_floatx() == "float64"
    # As when a stage saved by an earlier release is loaded.
    assert TorchModel()._set(_history=records, output_cols=["old"]).getHistory() == records


def test_a_subclass_with_a_param_of_spark_mls_name_keeps_that_param():
    from hvd_cluster.estimators.stages.spark_ml import Param, Params

    class VisionModel(TorchModel):
        labelCol = Param(Params._dummy(), "labelCol", "column of the label")  # noqa: N815

        def __init__(self, **kwargs):
            super().__init__()
            self._setDefault(labelCol="label", feature_columns=["image"], outputCols=["scores"])
            self._set(**kwargs)
            self.setLabelColoumns([self.getOrDefault(self.labelCol)])

    model = VisionModel(labelCol="kind")
    assert (model.getOrDefault("labelCol"), model.getLabelColumns()) == ("kind", ["kind"])
    other = model.copy({model.labelCol: "other"})
    assert (other.getOrDefault(other.labelCol), other.getOutputCols()) == ("other", ["scores"])
