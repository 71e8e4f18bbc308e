"""`import petastorm...` after `import hvd_cluster.compat`, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cluster.oldpaths.shim import shim_folder
from hvd_cluster.oldpaths.table import PETASTORM_TABLE

WALK = """
import importlib, json
import hvd_cluster.compat
from hvd_cluster.oldpaths.table import PETASTORM_TABLE
failed = {}
for path, row in PETASTORM_TABLE.items():
    old = ".".join(filter(None, ("petastorm", path)))
    try:
        module = importlib.import_module(old)
        for name in row.names:
            getattr(module, name)
    except Exception as error:
        failed[old] = repr(error)
print(json.dumps(failed))
"""


def printed(code: str, cwd: Path, **environ: str) -> str:
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


def test_every_row_leads_to_something(tmp_path: Path) -> None:
    assert len(PETASTORM_TABLE) > 10
    assert json.loads(printed(WALK, tmp_path)) == {}


@pytest.mark.parametrize("shim", [False, True])
def test_a_program_written_for_petastorm_runs(tmp_path: Path, shim: bool) -> None:
    code = f"""
{"" if shim else "import hvd_cluster.compat"}
import petastorm, numpy as np
from petastorm import make_reader
from petastorm.unischema import Unischema, UnischemaField
from petastorm.codecs import CompressedImageCodec, NdarrayCodec
from petastorm.etl.dataset_metadata import materialize_dataset
from petastorm.pytorch import DataLoader
from petastorm.spark import make_spark_converter
with DataLoader(make_reader({str(Path(__file__).parents[1] / "petastorm/files/keyed")!r}, ["id"]), 10) as loader:
    print(petastorm.__version__, sorted(next(iter(loader))["id"].tolist()))
"""
    environ = {"PYTHONPATH": shim_folder()} if shim else {}
    assert printed(code, tmp_path, **environ) == "0.13.1 [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"


@pytest.mark.parametrize("shim", [False, True])
def test_the_real_petastorm_comes_first(tmp_path: Path, shim: bool) -> None:
    (tmp_path / "site" / "petastorm").mkdir(parents=True)
    (tmp_path / "site" / "petastorm" / "__init__.py").write_text("__version__ = 'real'\n")
    (tmp_path / "site" / "petastorm" / "codecs.py").write_text("NdarrayCodec = 'real'\n")
    entries = [*([shim_folder()] if shim else []), str(tmp_path / "site")]
    code = """
import hvd_cluster.compat, petastorm
from petastorm.codecs import NdarrayCodec
print(petastorm.__version__, NdarrayCodec)
"""
    assert printed(code, tmp_path, PYTHONPATH=os.pathsep.join(entries)) == "real real"


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    code = "import hvd_cluster.compat\ntry:\n    import petastorm.ngram\nexcept ImportError as error:\n    print(error)"
    assert "no such path of petastorm's" in printed(code, tmp_path)
    name = code.replace("import petastorm.ngram", "from petastorm.tf_utils import tf_tensors")
    assert "The nearest that it serves: petastorm.tf_utils;" in printed(name, tmp_path)


def test_the_migration_guide_lists_every_path() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    listed = set(re.findall(r"^\| `petastorm\.?([\w.]*)` \|", guide, flags=re.MULTILINE))
    assert listed == set(PETASTORM_TABLE)
