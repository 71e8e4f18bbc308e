from __future__ import annotations

import inspect
import pickle
import warnings

import pytest
import torch

from hvd_cluster.estimators import KerasEstimator, KerasModel, LightningEstimator, TorchEstimator, TorchModel


def test_every_param_has_a_setter_that_returns_the_stage_and_a_getter():
    net = torch.nn.Linear(2, 1)
    estimator = TorchEstimator()
    for name, value in {"Model": net, "Epochs": 3, "BatchSize": 7, "FeatureCols": ["a"], "LabelCols": ["b"]}.items():
        assert getattr(estimator, f"set{name}")(value) is estimator
        assert getattr(estimator, f"get{name}")() == value
    for row in TorchEstimator.param_rows.values():
        assert estimator.hasDefault(row.key)


def test_horovods_odd_accessors_are_there():
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
def test_a_setter_refuses_what_the_param_cannot_hold(name, value):
    setter = getattr(TorchEstimator(), "set" + "".join(part.capitalize() for part in name.split("_")))
    with pytest.raises(ValueError, match=f"{name}="):
        setter(value)


def test_an_unknown_param_is_a_type_error_with_the_near_miss():
    with pytest.raises(TypeError, match=r"no param 'epoch' \(did you mean epochs"):
        TorchEstimator(epoch=3)


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
    assert "epochs: how often" in estimator.explainParams()
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


def test_a_subclass_may_have_params_of_its_own_in_the_way_of_synapse_ml():
    from hvd_cluster.estimators.stages.stage import Param, Params

    class Vision(TorchEstimator):
        backbone = Param(Params._dummy(), "backbone", "name of the backbone")

        def __init__(self, **kwargs):
            super().__init__()
            self._setDefault(backbone="resnet18", feature_cols=["image"])
            self._set(**kwargs)

    estimator = Vision(backbone="resnet50", epochs=2)
    assert estimator.getOrDefault(estimator.backbone) == "resnet50"
    assert (estimator.getEpochs(), estimator.getFeatureCols()) == (2, ["image"])


def test_importing_the_package_warns_of_nothing_and_loads_no_framework():
    import subprocess
    import sys

    code = "import sys, hvd_cluster.estimators; print([m for m in ('torch', 'pyspark', 'pyarrow') if m in sys.modules])"
    with warnings.catch_warnings():
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
