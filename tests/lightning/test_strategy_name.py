"""``Trainer(strategy="horovod")`` in programs that do not import ``hvd_cluster.lightning``, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hvd_cluster

QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")

#: A Trainer looks for MPI, which would start Open MPI's daemon.
TRAINER = """
import sys, warnings
sys.modules["mpi4py.MPI"] = None
warnings.simplefilter("ignore")
import lightning.pytorch as pl
trainer = pl.Trainer(strategy="horovod", logger=False, enable_checkpointing=False, barebones=True)
said = type(trainer.strategy).__module__, trainer.strategy.scale_lr, trainer.world_size
print(*said, file=open(sys.argv[1] + str(trainer.global_rank), "w"))
"""

#: In place of Lightning, with a registry that shows what is registered. Nothing of it takes a second to import.
FAKE = """
class StrategyRegistry(dict):
    def register(self, name, strategy, description, **init_params):
        self[name] = strategy
StrategyRegistry = StrategyRegistry()
"""


def python(*arguments: str, cwd: Path, **environ: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **QUIET, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake_lightning(folder: Path, package: str) -> dict[str, str]:
    """PYTHONPATH for a process that finds a Lightning of nothing but a registry."""
    strategies = folder / package.replace(".", "/") / "strategies"
    strategies.mkdir(parents=True)
    for parent in strategies.parents[: len(package.split("."))]:
        (parent / "__init__.py").touch()
    (strategies / "__init__.py").write_text(FAKE)
    ours = str(Path(hvd_cluster.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join([str(folder), ours])}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("order", ["hvd_cluster.compat, {0}", "{0}, hvd_cluster.compat"])
def test_compat_registers_the_name_whichever_is_imported_first(package: str, order: str, tmp_path: Path) -> None:
    strategies = f"{package}.strategies"
    code = f"""
import sys, {order.format(strategies)}
print(list({strategies}.StrategyRegistry), sorted({{"torch", "hvd_cluster.lightning"}} & set(sys.modules)))
"""
    assert python("-c", code, cwd=tmp_path, **fake_lightning(tmp_path, package)) == "['horovod'] []"


def test_a_strategy_of_that_name_stays(tmp_path: Path) -> None:
    environ = fake_lightning(tmp_path, "lightning.pytorch")
    own = "\nStrategyRegistry.register('horovod', 'their own', '')\n"
    file = tmp_path / "lightning/pytorch/strategies/__init__.py"
    file.write_text(file.read_text() + own)
    code = "import hvd_cluster.compat, lightning.pytorch.strategies as s; print(s.StrategyRegistry['horovod'])"
    assert python("-c", code, cwd=tmp_path, **environ) == "their own"


def test_compat_imports_neither_lightning_nor_torch(tmp_path: Path) -> None:
    code = """
import sys, hvd_cluster.compat
print(sorted({"torch", "lightning", "pytorch_lightning"} & set(sys.modules)))
"""
    assert python("-c", code, cwd=tmp_path) == "[]"


def test_the_module_keeps_its_source_and_reloads(tmp_path: Path) -> None:
    code = """
import importlib, inspect, hvd_cluster.compat, lightning.pytorch.strategies as s
print("StrategyRegistry" in inspect.getsource(s), list(importlib.reload(s).StrategyRegistry))
"""
    environ = fake_lightning(tmp_path, "lightning.pytorch")
    assert python("-c", code, cwd=tmp_path, **environ) == "True ['horovod']"


def test_a_program_under_hvdrun_that_imports_nothing_of_ours_has_the_name(tmp_path: Path) -> None:
    environ = fake_lightning(tmp_path, "lightning.pytorch")
    program = "import sys, lightning.pytorch.strategies as s; print(list(s.StrategyRegistry))"
    told = python(
        *("-m", "hvd_cluster.launch.cli.main", "-np", "1", sys.executable, "-c", program), cwd=tmp_path, **environ
    )
    assert told == "[0]<stdout>:['horovod']"


def test_a_child_of_a_worker_runs_the_sitecustomize_that_it_would_have_run(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = True\n")
    ours = Path(hvd_cluster.__file__).parent / "launch/startup"
    for entries in ([ours, theirs], [theirs, ours], [ours, theirs, ours]):
        path = os.pathsep.join(map(str, entries))
        code = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
        assert python("-c", code, cwd=tmp_path, PYTHONPATH=path) == f"True {theirs / 'sitecustomize.py'}"


def test_a_python_without_hvd_cluster_imports_lightning_all_the_same(tmp_path: Path) -> None:
    environ = fake_lightning(tmp_path, "lightning.pytorch")
    startup = str(Path(hvd_cluster.__file__).parent / "launch/startup")
    path = os.pathsep.join([str(tmp_path), startup])
    code = """
import sys
sys.modules["hvd_cluster"] = None  # what makes its import fail
import lightning.pytorch.strategies as s
print(list(s.StrategyRegistry))
"""
    assert python("-c", code, cwd=tmp_path, **{**environ, "PYTHONPATH": path}) == "[]"


@needs_lightning
@pytest.mark.slow
def test_a_trainer_takes_the_name_after_compat(tmp_path: Path) -> None:
    python("-c", f"import hvd_cluster.compat\n{TRAINER}", f"{tmp_path}/said", cwd=tmp_path)
    assert (tmp_path / "said0").read_text() == "hvd_cluster.lightning.strategy True 1\n"


@needs_lightning
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["hvdrun", "run"])
def test_a_trainer_takes_the_name_in_workers(launcher: str, tmp_path: Path) -> None:
    said = f"{tmp_path}/said"
    if launcher == "hvdrun":
        command = ["-m", "hvd_cluster.launch.cli.main", "-np", "2", sys.executable, "-c", TRAINER, said]
    else:
        work = f"import sys; sys.argv[1:] = [{said!r}]\n{TRAINER}"
        command = ["-c", f"import hvd_cluster; hvd_cluster.run(exec, ({work!r}, {{}}), num_proc=2)"]
    python(*command, cwd=tmp_path)
    assert [Path(said + str(rank)).read_text() for rank in (0, 1)] == ["hvd_cluster.lightning.strategy True 2\n"] * 2
