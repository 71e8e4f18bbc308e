"""Models sent to tasks that no launcher of ours has started."""

from __future__ import annotations

import subprocess
import sys

NET = """
import torch
import horovod.torch as hvd

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * hvd.size()
"""
SHIP = """
import cloudpickle, pathlib
import hvd_cluster.compat
from net import Net
from hvd_cluster.estimators.scoring.shipped_model import ShippedModel, content_key
blob = cloudpickle.dumps(Net(2, 1))
pathlib.Path("shipped").write_bytes(cloudpickle.dumps(ShippedModel(content_key(blob), blob)))
"""
LOAD = "import pickle; print(type(pickle.load(open('shipped', 'rb')).load()).__name__)"


def test_a_model_whose_module_imports_horovod_loads_in_a_process_without_the_old_paths(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    for code, said in ((SHIP, ""), (LOAD, "Net")):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == said, done.stderr
