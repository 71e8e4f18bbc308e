"""A Keras model on a column of strings."""

import data
import keras
import numpy as np

from hvd_cluster.estimators import KerasEstimator

WORDS = [*data.GOOD, *data.BAD, *data.OTHERS]


def counts(batch):
    return np.array([[text.split().count(word) for word in WORDS] for text in batch["text"]], "float32")


net = keras.Sequential([keras.Input((len(WORDS),)), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
estimator = KerasEstimator(model=net, optimizer=keras.optimizers.Adam(0.02), loss=loss, num_proc=2, epochs=8)
estimator.setPreprocess(counts).setFeatureCols(["text"]).setLabelCols(["label"]).setOutputKinds(["argmax"])
train, test = data.reviews()
scored = estimator.fit(train).transform(test)
print("right:", scored.where("label = label__output").count() / test.count())
