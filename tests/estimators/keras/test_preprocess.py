"""Raw columns through ``preprocess`` into Keras models, on each backend of Keras."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS = ["good", "bad", "fine", "awful"]


def reviews(rows=96):
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) if row % 9 else None for row in range(rows)]
    return pd.DataFrame(
        {
            "text": texts,
            "price": [None if row % 5 == 0 else row / rows for row in range(rows)],
            "label": [float(text is not None and "good" in text) for text in texts],
        }
    )


def encode(batch):
    import numpy as np

    ids = np.zeros((len(batch["text"]), 3), np.int32)
    for row, text in enumerate(batch["text"]):
        if text is not None:
            ids[row] = [WORDS.index(word) + 1 for word in text.split()]
    return {"price": np.nan_to_num(batch["price"])[:, None], "ids": ids}


def text_model(as_dict):
    import keras

    keras.utils.set_random_seed(1)
    ids, price = keras.Input((3,), dtype="int32", name="ids"), keras.Input((1,), name="price")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(5, 8)(ids))
    output = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([pooled, price]))
    model = keras.Model({"ids": ids, "price": price} if as_dict else [ids, price], output)
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
    return model


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_keras_model_learns_from_text_and_scores_it(driver, tmp_path, as_dict):
    data, encoder, make = reviews, encode, text_model

    def fn(workers, folder):
        import numpy as np

        from hvd_cluster.estimators import KerasEstimator, KerasModel

        frame = data()
        fit = KerasEstimator(
            model=make(as_dict),
            preprocess=encoder,
            feature_cols=["text", "price"],
            label_cols=["label"],
            batch_size=8,
            epochs=4,
            random_seed=5,
            verbose=0,
            validation=0.2,
            backend=workers(2),
        )
        model = fit.fit(frame)
        scored = model.transform(frame)["label__output"].to_numpy()
        model.save(f"{folder}/model")
        again = KerasModel.load(f"{folder}/model").transform(frame)["label__output"].to_numpy()
        made = encoder({name: frame[name].to_numpy() for name in ("text", "price")})
        given = {"ids": made["ids"], "price": made["price"].astype("float32")}
        expected = model.getModel().predict_on_batch(given if as_dict else [given["ids"], given["price"]])
        return model.getHistory()["loss"], np.abs(scored - np.asarray(expected).ravel()).max(), (again == scored).all()

    losses, apart, same = driver(fn, str(tmp_path))
    assert losses[-1] < 0.9 * losses[0]
    assert apart < 1e-6
    assert same


def test_a_feature_may_also_be_the_label(driver):
    data = reviews

    def fn(workers):
        import keras
        import numpy as np

        from hvd_cluster.estimators import KerasEstimator

        frame = data().drop(columns=["text", "price"])
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        net.compile("sgd", "mse")
        fit = KerasEstimator(
            model=net,
            preprocess=lambda batch: batch["label"][:, None] * 2,
            feature_cols=["label"],
            label_cols=["label"],
            epochs=1,
            verbose=0,
            backend=workers(1),
        )
        model = fit.fit(frame)
        expected = model.getModel().predict_on_batch(frame["label"].to_numpy("float32")[:, None] * 2)
        return np.abs(model.transform(frame)["label__output"].to_numpy() - np.asarray(expected).ravel()).max()

    assert driver(fn) < 1e-6


def test_bad_rows_of_the_validation_are_counted_apart(driver):
    data, encoder, make = reviews, encode, text_model

    def fn(workers):
        from hvd_cluster.estimators import KerasEstimator

        frame = data().assign(held=[row % 4 == 1 for row in range(96)])
        frame.loc[[16, 17, 21], "text"] = "unknown words"
        fit = KerasEstimator(
            model=make(True),
            preprocess=encoder,
            on_error="skip",
            feature_cols=["text", "price"],
            label_cols=["label"],
            validation="held",
            batch_size=8,
            shuffle=False,  # row 16 is in the first batch, which is read before the epoch begins
            epochs=1,
            verbose=0,
            backend=workers(2),
        )
        (record,) = fit.fit(frame).history.to_dict("records")
        return record["left_out_rows"], record["validation_left_out_rows"]

    assert driver(fn) == (1, 2)


def test_a_validation_counts_the_rows_after_a_batch_without_a_good_one(driver):
    def fn(workers):
        import keras
        import numpy as np
        import pandas as pd

        from hvd_cluster.estimators import KerasEstimator

        def positive(batch):
            if (batch["x"] < 0).any():
                raise ValueError("negative")
            return batch["x"][:, None].astype("float32")

        frame = pd.DataFrame({"x": np.arange(32.0), "y": np.arange(32.0), "held": np.arange(32) % 2 == 1})
        frame.loc[[1, 3, 9, 11], "x"] = -1.0  # the first and the third batch of the validation
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        net.compile(keras.optimizers.SGD(0.0), "mse")
        fit = KerasEstimator(
            model=net,
            preprocess=positive,
            on_error="skip",
            feature_cols=["x"],
            label_cols=["y"],
            validation="held",
            batch_size=16,
            val_batch_size=2,
            epochs=1,
            verbose=0,
            backend=workers(1),
        )
        good = frame[frame["held"] & (frame["x"] >= 0)]
        return fit.fit(frame).getHistory().get("val_loss"), float((good["y"] ** 2).mean())

    losses, expected = driver(fn)
    assert losses == pytest.approx([expected])


def test_what_the_model_does_not_take_is_named(driver):
    data, make = reviews, text_model

    def fn(workers):
        from hvd_cluster.errors import DataError
        from hvd_cluster.estimators import KerasEstimator

        fit = KerasEstimator(
            model=make(True),
            preprocess=lambda batch: {"other": [[0]] * len(batch["text"])},
            feature_cols=["text"],
            label_cols=["label"],
            backend=workers(2),
        )
        try:
            fit.fit(data())
        except DataError as error:
            return str(error)

    assert "the model does not take what preprocess returns" in driver(fn)
