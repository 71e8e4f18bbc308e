"""How items reach Keras on each of its backends."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import GeneratorType

import numpy as np
import pytest

from hvd_cluster.estimators.keras.data import as_taken

ITEMS = [(np.full((rows, 2), rows, "f4"), np.zeros(rows, "i8")) for rows in (4, 4, 1)]


def test_elsewhere_than_on_tensorflow_keras_gets_a_generator():
    taken = as_taken("torch", ITEMS[0], iter(ITEMS[1:]))
    assert isinstance(taken, GeneratorType)  # of any other iterator Keras takes single samples
    assert [x[0, 0] for x, _ in taken] == [4, 4, 1]


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="tensorflow is not installed")
@pytest.mark.slow
def test_tensorflow_gets_a_pipeline_that_keras_need_not_make():
    program = """
import numpy as np
from hvd_cluster.estimators.keras.data import as_taken
items = [(np.full((rows, 2), rows, "f4"), np.zeros(rows, "i8")) for rows in (4, 4, 1)]
taken = as_taken("tensorflow", items[0], iter(items[1:]))
assert taken.options().autotune.enabled is False  # its thread would hold up the end
assert [x[0, 0].numpy() for x, _ in taken] == [4, 4, 1]
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=110
    )  # a process of its own: TensorFlow's import leaves variables behind
    assert ended.returncode == 0, ended.stderr[-3000:]
