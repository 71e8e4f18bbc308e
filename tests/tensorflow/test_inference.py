"""What was trained here is used where this package is not: a Keras model, and the graph of a v1 session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Runs where importing hvd_cluster fails; prints what the models say of the inputs in the file, as JSON.
INFERENCE = """
import json, sys
sys.modules["hvd_cluster"] = None  # importing it raises ImportError from here on
folder = sys.argv[1]
import keras
import numpy as np
import tensorflow.compat.v1 as tf

x = np.array(json.load(open(f"{folder}/inputs.json")), "float32")
found = {"keras": keras.models.load_model(f"{folder}/model.keras").predict(x, verbose=0).tolist()}
class SyncBatchNormalization(keras.layers.BatchNormalization):
    pass
plain = {"SyncBatchNormalization": SyncBatchNormalization}
normalised = keras.models.load_model(f"{folder}/normalised.keras", custom_objects=plain)
found["normalised"] = normalised.predict(x, verbose=0).tolist()
served_normalised = tf.saved_model.load_v2(f"{folder}/served_normalised")
found["served_normalised"] = served_normalised.serve(x).numpy().tolist()
served = tf.saved_model.load_v2(f"{folder}/served")
found["served"] = served.serve(x).numpy().tolist()
with tf.Graph().as_default(), tf.Session() as session:
    saver = tf.train.import_meta_graph(f"{folder}/v1.meta")
    saver.restore(session, f"{folder}/v1")
    found["v1"] = session.run("answer:0", {"x:0": x}).tolist()
    frozen = tf.graph_util.convert_variables_to_constants(session, session.graph.as_graph_def(), ["answer"])
found["ops"] = sorted({node.op for node in frozen.node} & {"PyFunc", "EagerPyFunc"})
with tf.Graph().as_default(), tf.Session() as session:
    tf.import_graph_def(frozen, name="")
    found["frozen"] = session.run("answer:0", {"x:0": x}).tolist()
try:
    import hvd_cluster
except ImportError:
    found["absent"] = True
print(json.dumps(found))
"""


@pytest.mark.slow
def test_models_work_where_this_package_cannot_be_imported(two: Any, tmp_path: Path) -> None:
    def fn(hvd: Any, folder: str) -> dict[str, Any]:
        import keras
        import numpy as np
        import tensorflow.compat.v1 as tf

        import hvd_cluster.keras as hvd_keras

        rng = np.random.default_rng(hvd.rank())
        x = rng.normal(size=(16, 3)).astype("float32")
        y = x @ np.float32([[2.0], [-1.0], [0.5]])
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        start = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=start)
        normalised = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)])
        normalised.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        start = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)]
        normalised.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=start)

        with tf.Graph().as_default(), tf.Session() as session:
            inputs = tf.placeholder(tf.float32, [None, 3], name="x")
            w = tf.get_variable("w", initializer=tf.zeros([3, 1]))
            answer = tf.identity(tf.matmul(inputs, w), name="answer")
            optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
            train = optimizer.minimize(tf.reduce_mean(tf.square(answer - y)))
            session.run(tf.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))
            for _ in range(3):
                session.run(train, {inputs: x})
            expected = session.run(answer, {inputs: np.ones((2, 3), "float32")})
            if hvd.rank() == 0:
                tf.train.Saver().save(session, f"{folder}/v1")
        if hvd.rank() == 0:
            model.save(f"{folder}/model.keras")
            model.export(f"{folder}/served")
            normalised.save(f"{folder}/normalised.keras")
            normalised.export(f"{folder}/served_normalised")
        ones = np.ones((2, 3))
        answers = {"keras": model.predict(ones, verbose=0), "normalised": normalised.predict(ones, verbose=0)}
        return {name: value.tolist() for name, value in {**answers, "v1": expected}.items()}

    here, there = two(fn, str(tmp_path))
    assert here == there
    (tmp_path / "inputs.json").write_text(json.dumps([[1.0] * 3] * 2))
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        [sys.executable, "-c", INFERENCE, str(tmp_path)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["absent"]
    assert found["ops"] == []
    same = {"keras": "keras", "served": "keras", "v1": "v1", "frozen": "v1"}
    same |= {"normalised": "normalised", "served_normalised": "normalised"}
    for name, same_as in same.items():
        for ours, theirs in zip(here[same_as], found[name], strict=True):
            assert abs(ours[0] - theirs[0]) < 1e-6, name
