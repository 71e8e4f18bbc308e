"""Our base classes behave like pyspark's, and estimators work with either."""

from __future__ import annotations

import pickle

import pytest

from hvd_cluster.estimators.stages import plain_stage

pyspark_param = pytest.importorskip("pyspark.ml.param", reason="pyspark is not installed")
pyspark_base = pytest.importorskip("pyspark.ml.base", reason="pyspark is not installed")


def stage_over(params, estimator):
    """The same class over a given base."""

    class Doubler(estimator):
        factor = params.Param(params.Params._dummy(), "factor", "what to multiply by", typeConverter=float)
        label = params.Param(params.Params._dummy(), "label", "a text")

        def __init__(self):
            super().__init__()
            self._setDefault(factor=2)

        def _fit(self, dataset):
            return (dataset * self.getOrDefault("factor"), self.uid)

    return Doubler


@pytest.fixture(params=["pyspark", "plain"])
def doubler(request):
    if request.param == "pyspark":
        return stage_over(pyspark_param, pyspark_base.Estimator)
    return stage_over(plain_stage, plain_stage.Estimator)


def test_values_beat_defaults(doubler):
    stage = doubler()
    assert (stage.getOrDefault("factor"), stage.isSet("factor"), stage.isDefined("label")) == (2.0, False, False)
    stage.set(stage.factor, 5)
    assert (stage.getOrDefault(stage.factor), stage.hasDefault("factor")) == (5.0, True)
    stage.clear(stage.factor)
    assert stage.getOrDefault("factor") == 2.0
    with pytest.raises(KeyError):
        stage.getOrDefault("label")


def test_a_param_is_pickled_with_its_converter():
    param = plain_stage.Param(plain_stage.Params._dummy(), "label", "a text")
    again = pickle.loads(pickle.dumps(param))
    assert again == param
    assert again.typeConverter("a") == "a"


def test_a_copy_keeps_the_uid_and_takes_extra_values(doubler):
    stage = doubler()
    other = stage.copy({stage.factor: 7})
    assert (other.uid, other.getOrDefault("factor"), stage.getOrDefault("factor")) == (stage.uid, 7.0, 2.0)
    assert stage.extractParamMap({stage.label: "x"}) == {stage.factor: 2.0, stage.label: "x"}


def test_fit_takes_a_param_map_or_a_list_of_them(doubler):
    stage = doubler()
    assert stage.fit(3)[0] == 6.0
    assert stage.fit(3, {stage.factor: 10})[0] == 30.0
    assert [value for value, _ in stage.fit(3, [{stage.factor: 1}, {stage.factor: 4}])] == [3.0, 12.0]
    with pytest.raises(TypeError, match="param map"):
        stage.fit(3, "factor")


def test_params_are_explained_and_found_by_name(doubler):
    stage = doubler()
    assert [param.name for param in stage.params] == ["factor", "label"]
    assert stage.explainParam("factor") == "factor: what to multiply by (default: 2.0)"
    assert stage.explainParam("label") == "label: a text (undefined)"
    assert stage.hasParam("factor")
    assert not stage.hasParam("fit")
    assert stage.getParam("label") == stage.label


def test_a_param_of_another_stage_is_rejected(doubler):
    with pytest.raises(ValueError, match="does not belong"):
        doubler().set(doubler().factor, 3)


def test_a_new_uid_keeps_the_values(doubler):
    stage = doubler()
    stage.set(stage.factor, 5)
    stage._resetUid("Doubler_1")
    assert (stage.uid, stage.factor.parent, stage.getOrDefault(stage.factor)) == ("Doubler_1", "Doubler_1", 5.0)
