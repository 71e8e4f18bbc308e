"""Type checkers and editors know the params of estimators and models."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLASSES = runpy.run_path(str(HERE / "typed_params.py"))["CLASSES"]


def test_typed_constructors_are_those_of_the_tables() -> None:
    printed = subprocess.run(
        [sys.executable, HERE / "typed_params.py"], capture_output=True, text=True, check=True, timeout=100
    )
    found = (ROOT / "hvd_cluster/estimators/typed_params.py").read_text()
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(printed.stdout)), (
        "python tests/house/typed_params.py --write"
    )


def test_the_estimators_use_every_param() -> None:
    """A row without a use would be accepted and silently ignored."""
    folder = ROOT / "hvd_cluster" / "estimators"
    tables = {"params.py", "typed_params.py"}
    words = {
        word
        for path in folder.rglob("*.py")
        if path.name not in tables
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    rows = [row for given in CLASSES.values() for table in given for row in table]
    accessors = {row.name: f"get{row.param[0].upper()}{row.param[1:]}" for row in rows if row.param}
    unused = {
        row.name
        for row in rows
        if not row.doc.startswith("no effect: ") and not {row.name, accessors.get(row.name)} & words
    }
    assert not unused


@pytest.mark.timeout(600)  # mypy has no cache yet
def test_mypy_refuses_a_param_that_does_not_exist_or_has_another_type(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from hvd_cluster.estimators import LocalBackend, RayBackend, SparkBackend, TorchEstimator, TorchModel\n"
        "TorchEstimator(model=None, batch_size=64, feature_cols=['x'], labelCol='y', store='work')\n"
        "TorchEstimator(modell=None)\n"
        "TorchEstimator(batch_size='64')\n"
        "TorchModel(history=[], outputCols=['a'])\n"
        "LocalBackend(2, {'A': '1'}, verbose=0)\n"
        "LocalBackend(2, verbos=0)\n"
        "SparkBackend(start_timeot=3)\n"
        "RayBackend(use_gppu=True)\n"
        "SparkBackend(start_timeout='x')\n"
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    expected = [
        'Unexpected keyword argument "modell"',
        'Argument "batch_size"',
        'Unexpected keyword argument "verbos"',
        'Unexpected keyword argument "start_timeot"',
        'Unexpected keyword argument "use_gppu"',
        'Argument "start_timeout"',
    ]
    assert len(errors) == len(expected), checked.stdout
    assert [text for text, line in zip(expected, errors, strict=True) if text not in line] == [], checked.stdout
