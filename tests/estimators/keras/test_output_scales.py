"""Whether a Keras classifier returns probabilities."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras", reason="keras is not installed")

from hvd_cluster.estimators.keras.output_scales import output_scales  # noqa: E402


def sequential(*layers):
    return keras.Sequential([keras.layers.Input((3,)), *layers])


@pytest.mark.parametrize(
    ("layers", "loss", "scales"),
    [
        ([keras.layers.Dense(1, "sigmoid")], "binary_crossentropy", ("probability",)),
        ([keras.layers.Dense(1, "sigmoid")], "mse", ("probability",)),
        ([keras.layers.Dense(2), keras.layers.Softmax()], None, ("probability",)),
        ([keras.layers.Dense(2), keras.layers.Activation("softmax")], "mse", ("probability",)),
        ([keras.layers.Dense(1)], keras.losses.BinaryCrossentropy(from_logits=True), ("binary_logit",)),
        ([keras.layers.Dense(1)], keras.losses.BinaryFocalCrossentropy(from_logits=True), ("binary_logit",)),
        ([keras.layers.Dense(2)], keras.losses.CategoricalCrossentropy(from_logits=True), ("logit",)),
        ([keras.layers.Dense(2)], keras.losses.SparseCategoricalCrossentropy(), ("probability",)),
        ([keras.layers.Dense(2)], keras.losses.categorical_crossentropy, ("probability",)),
        ([keras.layers.Dense(1)], "mse", ("",)),
    ],
)
def test_by_the_loss_or_the_last_layer(layers, loss, scales):
    assert output_scales(sequential(*layers), loss, 1, None) == scales


@pytest.mark.parametrize(("last", "scale"), [(None, ""), ("sigmoid", "probability")])
def test_the_name_of_a_users_loss_says_nothing(last, scale):
    def smoothed_crossentropy(label, output):
        return keras.losses.binary_crossentropy(label, output, from_logits=last is None, label_smoothing=0.1)

    assert output_scales(sequential(keras.layers.Dense(1, last)), smoothed_crossentropy, 1, None) == (scale,)


def test_each_output_of_a_dict_in_the_order_of_its_keys():
    x = keras.layers.Input((3,))
    model = keras.Model(x, {"a": keras.layers.Dense(1, "sigmoid")(x), "b": keras.layers.Dense(1)(x)})
    loss = {"a": "mse", "b": keras.losses.BinaryCrossentropy(from_logits=True)}
    assert output_scales(model, loss, 2, ("b", "a")) == ("binary_logit", "probability")


def test_a_model_without_a_graph_is_known_by_its_loss():
    class Own(keras.Model):
        def call(self, x):
            return x

    assert output_scales(Own(), "mse", 1, None) == ("",)
    assert output_scales(Own(), ["binary_crossentropy", "mse"], 2, None) == ("probability", "")
