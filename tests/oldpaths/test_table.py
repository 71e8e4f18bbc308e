from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvd_cluster.oldpaths.table import OWN_TABLE, TABLE, children_of, row_of

# Imports every path of the table below one root, and every name that a row spells out; prints what failed.
WALK = """
import importlib, json, sys
from importlib.util import find_spec
from hvd_cluster.oldpaths.table import TABLES
root = sys.argv[1]
if root == "horovod":
    import hvd_cluster.compat
failed = {}
for path, row in TABLES[root].items():
    if path.startswith("mxnet") and find_spec("mxnet") is None:
        continue  # make matrix-mxnet has it
    old = ".".join(filter(None, (root, path)))
    try:
        module = importlib.import_module(old)
        for name in (*row.names, *row.absent) if root == "horovod" else ():
            exec(f"from {old} import {name}")
    except Exception as error:
        failed[old] = repr(error)
print(json.dumps(failed))
"""


def test_no_name_is_both_served_and_absent() -> None:
    assert {path: both for path, row in TABLE.items() if (both := set(row.names) & set(row.absent))} == {}


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("root", ["horovod", pytest.param("hvd_cluster", marks=pytest.mark.slow)])
def test_every_row_leads_to_something(root: str, tmp_path: Path) -> None:
    walk = subprocess.run([sys.executable, "-c", WALK, root], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(walk.stdout) == {}


def test_a_package_between_rows_has_an_empty_row() -> None:
    assert row_of("spark.common") is not None
    assert "spark.common" not in TABLE
    assert row_of("spark.comm") is None


def test_children_are_one_step_below() -> None:
    assert {"common", "runner", "torch"} <= children_of("")
    assert "store" in children_of("spark.common")
    assert children_of("torch.mpi_ops") == set()


@pytest.mark.parametrize("module", ["data.converter", "data.petastorm", "data.petastorm.codecs"])
def test_a_moved_module_of_ours_has_its_old_path_below_our_root_only(module: str) -> None:
    pytest.importorskip("pyarrow")
    old = importlib.import_module(f"hvd_cluster.{module}")
    now = importlib.import_module(OWN_TABLE[module].module)
    public = {name for name in dir(now) if not name.startswith("_")}
    assert public
    assert all(getattr(old, name) is getattr(now, name) for name in public)
    assert row_of(module) is None
