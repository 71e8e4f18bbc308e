"""``import hvd_cluster.compat``, each time in a process of its own: it changes what the whole process can import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cluster.oldpaths.carry import carry

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
    assert python(code, tmp_path, **carry({}, wanted=True)) == "hvd_cluster.errors"


def test_the_children_of_a_worker_answer_for_horovod_too(tmp_path: Path) -> None:
    grandchild = "import horovod.common.exceptions as e; print(e.HorovodInternalError.__name__)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}], check=True)"
    assert python(child, tmp_path, **carry({}, wanted=True)) == "HorovodInternalError"


def test_submodules_are_reached_as_attributes(tmp_path: Path) -> None:
    code = "import hvd_cluster.compat, horovod; print(horovod.common.exceptions.HostsUpdatedInterrupt.__module__)"
    assert python(code, tmp_path) == "hvd_cluster.errors"


def test_a_framework_that_is_not_there_is_an_import_error(tmp_path: Path) -> None:
    assert "No module named 'horovod.mxnet'" in failure("import hvd_cluster.compat, horovod.mxnet", tmp_path)


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
    print(horovod.run(work, args=(7,), num_proc=2))
"""


def test_workers_answer_for_horovod_where_the_driver_does(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([(7, True, "hvd_cluster.errors", "0.28.1")] * 2)
