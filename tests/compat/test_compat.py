"""``import hvd_cluster.compat``, each time in a process of its own: it changes what the whole process can import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvd_cluster.oldpaths.shim import shim_env

# A pickle that names HorovodInternalError by its old path, as programs of Horovod's days wrote it.
OLD_PICKLE = b"chorovod.common.exceptions\nHorovodInternalError\n(S'gone'\ntR."


def python(code: str, cwd: Path, **environ: str) -> str:
    """What a fresh interpreter prints when it runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def failure(code: str, cwd: Path, **environ: str) -> str:
    """The last line that a fresh interpreter writes when it fails over ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_horovod_is_a_module_of_its_own(tmp_path: Path) -> None:
    code = (
        "import hvd_cluster, hvd_cluster.compat, horovod; "
        "print(horovod.__version__, hvd_cluster.__version__ == horovod.__version__, horovod is hvd_cluster)"
    )
    assert python(code, tmp_path) == "0.28.1 False False"


def test_importing_hvd_cluster_alone_does_not_answer_for_horovod(tmp_path: Path) -> None:
    assert "No module named 'horovod'" in failure("import hvd_cluster.common.exceptions, horovod", tmp_path)


def test_importing_compat_loads_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys, hvd_cluster.compat, horovod; "
        "print(sorted({'torch', 'numpy', 'pyspark', 'ray', 'pyarrow', 'cloudpickle'} & set(sys.modules)))"
    )
    assert python(code, tmp_path) == "[]"


def test_an_old_pickle_loads_in_a_process_that_never_imported_compat(tmp_path: Path) -> None:
    code = f"import pickle; print(type(pickle.loads({OLD_PICKLE!r})).__module__)"
    assert python(code, tmp_path, **shim_env({}, wanted=True)) == "hvd_cluster.errors"


def test_the_children_of_a_worker_answer_for_horovod_too(tmp_path: Path) -> None:
    grandchild = "import horovod.common.exceptions as e; print(e.HorovodInternalError.__name__)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}], check=True)"
    assert python(child, tmp_path, **shim_env({}, wanted=True)) == "HorovodInternalError"


def test_submodules_are_reached_as_attributes(tmp_path: Path) -> None:
    code = "import hvd_cluster.compat, horovod; print(horovod.common.exceptions.HostsUpdatedInterrupt.__module__)"
    assert python(code, tmp_path) == "hvd_cluster.errors"


def test_a_framework_that_is_not_there_is_an_import_error(tmp_path: Path) -> None:
    told = failure("import hvd_cluster.compat, horovod.mxnet", tmp_path)
    assert "ImportError: hvd_cluster.mxnet needs mxnet 1.9.1" in told


def test_a_folder_of_that_name_in_the_working_directory_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    assert python("import hvd_cluster.compat, horovod; print(horovod.__version__)", tmp_path) == "0.28.1"


@pytest.mark.parametrize("kind", ["distribution", "package"])
def test_beside_the_real_horovod_compat_refuses(kind: str, tmp_path: Path) -> None:
    if kind == "distribution":  # as the install that succeeds and builds nothing leaves it
        info = tmp_path / "horovod-0.28.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    else:
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").write_text("__version__ = '0.28.1'\n")
    text = failure("import hvd_cluster.compat", tmp_path, PYTHONPATH=str(tmp_path))
    assert "pip uninstall horovod" in text
    assert ("version 0.28.1" if kind == "distribution" else str(tmp_path)) in text


VERSION = "import importlib.metadata as m; print(m.version('horovod'), len([*m.distributions(name='horovod')]))"


def test_the_metadata_says_horovods_version_here_and_in_children(tmp_path: Path) -> None:
    assert python(f"import hvd_cluster.compat; {VERSION}", tmp_path) == "0.28.1 1"
    carried = shim_env(os.environ, wanted=True)
    assert python(VERSION, tmp_path, **carried) == "0.28.1 1"
    assert python(f"import hvd_cluster.compat; {VERSION}", tmp_path, **carried) == "0.28.1 1"
    assert "PackageNotFoundError" in failure(f"import hvd_cluster; {VERSION}", tmp_path)


# The driver names Horovod in a module global, in a global name and inside the function; a worker's child has the
# environment alone.
DRIVER = """
import subprocess, sys
import hvd_cluster.compat
import horovod
from horovod.common import exceptions
from horovod.common.exceptions import HostsUpdatedInterrupt

def work(step):
    import horovod.common.exceptions as again
    code = "import horovod; print(horovod.__version__)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return step, again is exceptions, HostsUpdatedInterrupt.__module__, child.stdout.strip()

if __name__ == "__main__":
    print(horovod.run(work, args=(7,), num_proc=2, hosts=sys.argv[1]))
"""


# Elsewhere an agent starts the worker, which has not imported compat.
@pytest.mark.parametrize("hosts", ["localhost:2", "localhost:1,elsewhere:1"])
@pytest.mark.usefixtures("loopback_ssh")
def test_workers_answer_for_horovod_where_the_driver_does(hosts: str, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, "driver.py", hosts], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([(7, True, "hvd_cluster.errors", "0.28.1")] * 2)


# Written for Horovod, word for word.
OLD_SCRIPT = """
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import ccl_built, cuda_built, ddl_built, mpi_built, nccl_built, rocm_built
from horovod.torch.mpi_ops import rank, synchronize

hvd.init()
torch.manual_seed(rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = hvd.allgather(model.weight.detach())
total = synchronize(hvd.allreduce_async(torch.ones(2), name="ones", op=hvd.Sum))
print(hvd.size(), torch.equal(weights[0], weights[1]), total.tolist(), hvd.allgather_object(rank()))
"""


def test_a_script_of_horovod_runs_under_horovodrun(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(OLD_SCRIPT)
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable, "old.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "2 True [2.0, 2.0] [0, 1]"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:{expected}" for rank in (0, 1)]


def test_old_estimator_names_are_the_new_classes(tmp_path: Path) -> None:
    code = """
import hvd_cluster.compat
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import LocalStore, Store
from horovod.spark.torch import TorchEstimator, TorchModel
from horovod.spark.torch.estimator import TorchEstimator as same
import hvd_cluster.data.store, hvd_cluster.estimators as new
print(
    TorchEstimator is same is new.TorchEstimator, TorchModel is new.TorchModel, SparkBackend is new.SparkBackend,
    issubclass(LocalStore, Store), Store is hvd_cluster.data.store.Store,
)
"""
    assert python(code, tmp_path) == "True True True True True"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_private_class_of_distributed_optimizers_is_theirs(framework: str, tmp_path: Path) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    code = f"""
import hvd_cluster.compat, torch, horovod.{framework} as hvd
hvd.init()
if hvd.__name__.endswith("torch"):
    plain = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
else:
    import tensorflow as tf
    plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
class Own(hvd._DistributedOptimizer): ...
optimizer = hvd.DistributedOptimizer(plain)
print(isinstance(optimizer, hvd._DistributedOptimizer), isinstance(plain, hvd._DistributedOptimizer))
"""
    assert python(code, tmp_path, TF_CPP_MIN_LOG_LEVEL="3").splitlines()[-1] == "True False"
