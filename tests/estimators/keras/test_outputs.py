"""Keras models that return dicts: which label column belongs to which output."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def constant(value):
    import keras

    return keras.layers.Dense(1, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(value))


def functional(**values):
    import keras

    given = keras.Input((1,))
    return keras.Model(given, {name: constant(value)(given) for name, value in values.items()})


def subclassed(**values):
    import keras

    class Own(keras.Model):
        def __init__(self, values, **given):
            super().__init__(**given)
            self.values = dict(values)
            self.heads = [constant(value) for value in values.values()]

        def build(self, shape):
            for head in self.heads:
                head.build((None, 1))
            self.built = True

        def call(self, x):
            return {name: head(x) for name, head in zip(self.values, self.heads, strict=True)}

        def get_config(self):
            return {"values": self.values}

    model = Own(values)
    model.build((None, 1))
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (functional, ("price", "age")),
        (functional, ("z", "b")),
        (subclassed, ("price", "age")),
        (subclassed, ("z", "b")),
    ],
)
def test_training_and_scoring_match_a_dicts_outputs_with_the_same_labels(driver, tmp_path, make, names):
    """By name if the columns have their names, and else in the order of the model; keras sorts what it returns."""

    def fn(workers, folder):
        import pandas as pd

        from hvd_cluster.estimators import KerasEstimator, KerasModel

        labels = ("age", "price") if "age" in names else ("price", "age")
        frame = pd.DataFrame({"x": [[0.0]] * 8, "price": [20.0] * 8, "age": [-5.0] * 8})
        model = make(**dict(zip(names, (20.0, -5.0), strict=True)))
        model.compile("sgd", "mse")
        fitted = KerasEstimator(
            model=model,
            feature_cols=["x"],
            label_cols=labels,
            batch_size=8,
            epochs=1,
            verbose=0,
            backend=workers(1),
            custom_objects={"Own": type(model)},
        ).fit(frame)
        fitted.write().overwrite().save(folder)
        rows = [each.transform(frame[:1]).iloc[0] for each in (fitted, KerasModel.load(folder))]
        return fitted.getHistory()["loss"], [(float(row["price__output"]), float(row["age__output"])) for row in rows]

    assert driver(fn, str(tmp_path / "model")) == ([0.0], [(20.0, -5.0)] * 2)


@pytest.mark.parametrize("make", [functional, subclassed])
def test_outputs_without_a_label_become_columns_too(driver, make):
    def fn(workers):
        import pandas as pd

        from hvd_cluster.estimators import KerasEstimator

        model = make(hidden=3.0, age=-5.0)
        by_name = make.__name__ == "subclassed"  # before it is called, the names of its outputs are not known
        fitted = KerasEstimator(
            model=model,
            optimizer="sgd",
            loss={"age": "mse"} if by_name else "mse",
            metrics={"age": ["mae"]} if by_name else ["mae"],
            feature_cols=["x"],
            label_cols=["age"],
            batch_size=8,
            verbose=0,
            backend=workers(1),
            custom_objects={"Own": type(model)},
        ).fit(pd.DataFrame({"x": [[0.0]] * 8, "age": [-5] * 8}))
        scored = fitted.transform(pd.DataFrame({"x": [[0.0]]}))
        return fitted.getHistory(), scored.drop(columns="x").to_dict("records"), str(scored["age__output"].dtype)

    history, scored, dtype = driver(fn)
    assert history["loss"] == history["age_mae"] == [0.0]
    assert (scored, dtype) == ([{"age__output": -5, "hidden__output": 3.0}], "int64")


def test_a_loss_that_would_also_count_for_an_output_without_a_label_is_refused(driver):
    def fn(workers):
        import pandas as pd

        from hvd_cluster.estimators import KerasEstimator

        model = subclassed(hidden=3.0, age=-5.0)
        given = {"feature_cols": ["x"], "label_cols": ["age"], "verbose": 0, "backend": workers(1)}
        estimator = KerasEstimator(model=model, optimizer="sgd", loss="mse", **given)
        estimator.setCustomObjects({"Own": type(model)})
        with pytest.raises(ValueError, match=r"loss must be a dict .* \{'age': ...\}: the model also returns 'hidden'"):
            estimator.fit(pd.DataFrame({"x": [[0.0]] * 8, "age": [-5] * 8}))

    driver(fn)


@pytest.mark.parametrize("input_dtype", ["float32", "bfloat16"])
def test_a_model_that_returns_bfloat16_scores(driver, input_dtype):
    """NumPy has no bfloat16 of its own."""

    def fn(workers):
        import keras
        import pandas as pd

        from hvd_cluster.estimators import KerasEstimator

        given = keras.Input((1,), dtype=input_dtype)
        model = keras.Model(given, keras.layers.Dense(1, kernel_initializer="ones", dtype="mixed_bfloat16")(given))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        fit = KerasEstimator(model=model, batch_size=8, epochs=1, verbose=0, backend=workers(1))
        frame = pd.DataFrame({"x": [[1.5]] * 8, "y": [1.0] * 8})
        return fit.setFeatureCols(["x"]).setLabelCols(["y"]).fit(frame).transform(frame[:1])["y__output"].tolist()

    assert driver(fn) == [1.5]


def test_a_model_that_cannot_score_is_refused_before_the_fit(driver):
    def fn(workers):
        import keras
        import pandas as pd

        from hvd_cluster.errors import DataError
        from hvd_cluster.estimators import KerasEstimator

        class Own(keras.Model):
            def predict_step(self, *_):  # JAX passes more
                raise RuntimeError("not for scoring")

        given = keras.Input((1,))
        model = Own(given, keras.layers.Dense(1)(given))
        model.compile("sgd", "mse")
        fit = KerasEstimator(
            model=model, batch_size=8, epochs=1, verbose=0, backend=workers(1), custom_objects={"Own": Own}
        )
        try:
            fit.setFeatureCols(["x"]).setLabelCols(["y"]).fit(pd.DataFrame({"x": [[1.5]] * 8, "y": [1.0] * 8}))
        except DataError as error:
            return str(error)

    text = driver(fn)
    assert text.startswith("the model cannot score rows as transform does: RuntimeError: ")
    assert "not for scoring" in text


def test_a_model_that_computes_its_own_loss_needs_no_other(driver):
    def fn(workers):
        import keras
        import pandas as pd

        from hvd_cluster.estimators import KerasEstimator

        class Distance(keras.Model):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                return keras.ops.mean(keras.ops.abs(y_pred - y))

        given = keras.Input((1,))
        model = Distance(given, constant(3.0)(given))
        frame = pd.DataFrame({"x": [[0.0]] * 8, "y": [1.0] * 8})
        params = {"optimizer": keras.optimizers.SGD(0.0), "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8}
        estimator = KerasEstimator(model=model, custom_objects={"Distance": Distance}, verbose=0, **params)
        return estimator.setBackend(workers(1)).fit(frame).getHistory()["loss"]

    assert driver(fn) == [2.0]
