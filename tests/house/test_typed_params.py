"""Type checkers and editors know the params of estimators and models."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_typed_constructors_are_those_of_the_tables() -> None:
    printed = subprocess.run(
        [sys.executable, HERE / "typed_params.py"], capture_output=True, text=True, check=True, timeout=100
    )
    found = (ROOT / "hvd_cluster/estimators/typed_params.py").read_text()
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(printed.stdout)), (
        "python tests/house/typed_params.py > hvd_cluster/estimators/typed_params.py; ruff format hvd_cluster"
    )


def test_mypy_refuses_a_param_that_does_not_exist_or_has_another_type(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from hvd_cluster.estimators import TorchEstimator, TorchModel\n"
        "TorchEstimator(model=None, batch_size=64, feature_cols=['x'], labelCol='y', store='work')\n"
        "TorchEstimator(modell=None)\n"
        "TorchEstimator(batch_size='64')\n"
        "TorchModel(history=[], outputCols=['a'])\n"
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, checked.stdout
    assert 'Unexpected keyword argument "modell"' in errors[0]
    assert 'Argument "batch_size"' in errors[1]
