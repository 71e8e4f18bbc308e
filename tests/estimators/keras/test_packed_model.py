"""A Keras model on its way to another process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

SCRIPT = """
import datetime, pickle
import keras, numpy
from keras.src.saving import saving_lib
from hvd_cluster.estimators.keras.packed_model import PackedModel, Unpacking

class Clock(datetime.datetime):
    hour_now = 0

    @classmethod
    def now(cls, tz=None):
        cls.hour_now += 1
        return cls(2026, 1, 1, cls.hour_now)

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
model.compile(optimizer="adam", loss="mse")
saving_lib.datetime.datetime = Clock
packed = [pickle.dumps(Unpacking(PackedModel.of(model, {}))) for _ in range(2)]
assert Clock.hour_now == 2, "the two were saved at different times of the day"
print(packed[0] == packed[1])
model.layers[0].bias.assign([1.0, 2.0, 3.0])
print(packed[0] == pickle.dumps(Unpacking(PackedModel.of(model, {}))))
x = numpy.ones((2, 4), "float32")
again = pickle.loads(pickle.dumps(Unpacking(PackedModel.of(model, {}))))
print(bool((again.predict(x, verbose=0) == model.predict(x, verbose=0)).all()))
"""


@pytest.mark.slow
def test_equal_models_are_equal_bytes_whatever_the_time_of_day() -> None:
    """A cluster keeps one copy of what is sent to it again and again, as from each batch of a stream."""
    env = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


SYNCHRONISED = """
import pickle, subprocess, sys
import keras
import hvd_cluster.tensorflow as hvd
from hvd_cluster.estimators.keras.packed_model import PackedModel

model = keras.Sequential([keras.Input((4,)), hvd.SyncBatchNormalization()])
with open(sys.argv[1], "wb") as file:
    pickle.dump(PackedModel.of(model, {}), file)
code = "import pickle, sys; print(type(pickle.load(open(sys.argv[1], 'rb')).load().layers[0]).__module__)"
subprocess.run([sys.executable, "-c", code, sys.argv[1]], check=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs tensorflow")
def test_a_worker_loads_a_model_with_a_layer_of_ours(tmp_path: Path) -> None:
    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", SYNCHRONISED, str(tmp_path / "model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["hvd_cluster.tensorflow.sync_batch_norm"], done.stderr
