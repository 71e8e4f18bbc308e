"""Where TensorFlow or Keras is not installed, importing what needs it says which extra to install."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import importlib, json, sys

sys.modules |= {"tensorflow": None, "keras": None}  # as if neither were installed
found = {}
for name in ("hvd_cluster.tensorflow", "hvd_cluster.keras", "hvd_cluster.tensorflow.keras"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        found[name] = [type(error).__name__, str(error)]
import hvd_cluster.torch  # goes on working
print(json.dumps(found))
"""


def test_the_error_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {kind for kind, _ in found.values()} == {"MissingExtraError"}
    remedy = "pip install 'hvd-cluster[tensorflow]'"
    assert {name: text for name, (_, text) in found.items()} == {
        "hvd_cluster.tensorflow": f"tensorflow is not installed, but is needed by hvd_cluster.tensorflow: {remedy}",
        "hvd_cluster.keras": f"keras is not installed, but is needed by hvd_cluster.keras: {remedy}",
        "hvd_cluster.tensorflow.keras": f"tensorflow is not installed, but is needed by hvd_cluster.tensorflow: {remedy}",
    }
