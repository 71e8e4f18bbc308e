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
    for name, (library, needed_by) in {
        "hvd_cluster.tensorflow": ("tensorflow", "hvd_cluster.tensorflow"),
        "hvd_cluster.keras": ("keras", "hvd_cluster.keras"),
        "hvd_cluster.tensorflow.keras": ("tensorflow", "hvd_cluster.tensorflow"),
    }.items():
        kind, text = found[name]
        assert kind == "MissingExtraError"
        assert text.startswith(f"{library} is not installed, but is needed by {needed_by}: ")
        assert text.endswith("pip install '.[tensorflow]'")
