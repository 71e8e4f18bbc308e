"""Keras models as files of other runtimes, compared with what transform returns."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import cloudpickle
import pytest

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run_file(path, format, given):
    """The outputs of a file by name, and the names of its inputs."""
    import numpy as np

    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        names = [one.name for one in session.get_outputs()]
        return dict(zip(names, session.run(names, given), strict=True))
    if format == "torch":
        import torch

        found = torch.export.load(path).module()({name: torch.from_numpy(value) for name, value in given.items()})
        return {name: value.detach().numpy() for name, value in found.items()}
    import tensorflow as tf

    found = tf.saved_model.load(path).signatures["serving_default"](
        **{name: tf.constant(value) for name, value in given.items()}
    )
    return {name: np.asarray(value) for name, value in found.items()}


def fit(workers):
    import keras
    import numpy as np
    import pandas as pd

    from hvd_cluster.estimators import KerasEstimator

    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "x": list(rng.normal(size=(20, 4)).astype("f4")),
            "ids": list(rng.integers(0, 9, (20, 3))),
            "y": np.arange(20.0),
        }
    )
    numbers, ids = keras.Input((4,), name="numbers"), keras.Input((3,), dtype="int32", name="words")
    words = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 2)(ids))
    hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()([numbers, words]))
    model = keras.Model([numbers, ids], keras.layers.Dense(2)(keras.layers.Dropout(0.5)(hidden)))
    estimator = KerasEstimator(
        model=model,
        optimizer="sgd",
        loss=lambda y, output: keras.ops.mean((output - y) ** 2),
        feature_cols=["x", "ids"],
        label_cols=["y"],
        label_shapes=[[-1, 1]],
        backend=workers(1),
        verbose=0,
    )
    return estimator.fit(frame), frame


def test_a_file_has_the_columns_names_takes_any_number_of_rows_and_gives_the_scores(driver, backend, tmp_path):
    def fn(workers, folder, formats):
        import numpy as np

        os.environ["TMPDIR"] = folder  # importing onnxruntime leaves a file there
        model, frame = fit(workers)
        found = {}
        for format in formats:
            path = f"{folder}/model.{'pt2' if format == 'torch' else format}"
            model.export(path, format)  # before the model has been called here
            for rows in (frame, frame[:1]):
                given = {"x": np.stack(rows["x"]), "ids": np.stack(rows["ids"]).astype("int32")}
                outputs = run_file(path, format, given)
                scores = np.stack(model.transform(rows)["y__output"])
                found[format, len(rows)] = list(outputs), bool(np.allclose(outputs["y__output"], scores, atol=1e-5))
        return found

    formats = ["torch", *(["onnx"] if find_spec("onnxruntime") else [])]
    formats = formats if backend == "torch" else ["tf_saved_model"]
    found = driver(fn, str(tmp_path), formats)
    assert found == {(format, rows): (["y__output"], True) for format in formats for rows in (20, 1)}


def test_pairs_of_backend_and_format_that_do_not_work_are_refused_with_advice(driver, backend, tmp_path):
    def fn(workers, folder):
        import pytest

        from hvd_cluster.estimators import KerasModel

        model = KerasModel(model=fit(workers)[0].getModel(), feature_columns=["x", "ids"], label_columns=["y"])
        texts = {}
        for format in ("onnx", "torch", "tf_saved_model", "pmml"):
            with pytest.raises(ValueError, match="format|example") as caught:
                model.export(f"{folder}/model", format)
            texts[format] = str(caught.value)
        return texts

    texts = driver(fn, str(tmp_path))
    assert "'pmml' is not one of 'onnx', 'torch', 'tf_saved_model'" in texts["pmml"]
    if backend == "torch":
        assert "use 'onnx' or 'torch', or fit the model with KERAS_BACKEND=tensorflow" in texts["tf_saved_model"]
        assert "example is required" in texts["torch"]
    else:
        assert "use 'onnx' or 'tf_saved_model', or fit the model with KERAS_BACKEND=torch" in texts["torch"]
        assert "example is required" in texts["tf_saved_model"]
        converter = {"tensorflow": "tf2onnx", "jax": "jax2onnx"}[backend]
        if find_spec(converter) is None:
            assert f"pip install {converter}, or use 'tf_saved_model'" in texts["onnx"]


def test_a_file_that_cannot_have_the_models_scores_is_not_written(driver, backend, tmp_path):
    def fn(workers, path, format):
        import keras
        import pandas as pd
        import pytest

        from hvd_cluster.errors import DataError
        from hvd_cluster.estimators import KerasModel

        class Doubling(keras.Model):
            def predict_step(self, *given):
                found = super().predict_step(*given)
                return (2 * found[0], found[1]) if isinstance(found, tuple) else 2 * found  # on JAX with a state

        given = keras.Input((1,))
        model = Doubling(given, keras.layers.Dense(1, bias_initializer="ones")(given))
        fitted = KerasModel(model=model, feature_columns=["x"], label_columns=["y"])
        with pytest.raises(DataError, match="other values than the model in output 'y__output', apart by"):
            fitted.export(path, format, pd.DataFrame({"x": [[1.0], [2.0]]}))

    driver(fn, str(tmp_path / "model"), "torch" if backend == "torch" else "tf_saved_model")
    assert not (tmp_path / "model").exists()
