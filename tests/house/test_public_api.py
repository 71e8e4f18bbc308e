"""The public names of hvd_cluster, and how each is called, are those of the record; docstrings name the arguments."""

from __future__ import annotations

import difflib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_public_names_and_signatures_are_those_of_the_record() -> None:
    record = (HERE / "public_api.txt").read_text()
    changes = difflib.unified_diff(
        record.splitlines(), printed("public_api.py").splitlines(), "recorded", "found", n=0, lineterm=""
    )
    assert not (text := "\n".join(changes)), (
        f"{text}\nIf the change is meant: describe it in its docstring, docs/ and CHANGELOG.md, then "
        "python tests/house/public_api.py > tests/house/public_api.txt"
    )


def test_docstrings_name_each_argument() -> None:
    left_out = printed("undocumented.py")
    assert not left_out, (
        f"{left_out}\nName them in an Args section, or begin with the function that has the same, as :func:`name`"
    )


def printed(program: str) -> str:
    """What a program of this folder prints about all public modules."""
    missing = [name for name in ("tensorflow", "keras", "lightning", "pyspark", "ray") if not find_spec(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    run = subprocess.run([sys.executable, HERE / program], capture_output=True, text=True, check=False, timeout=110)
    assert run.returncode == 0, run.stderr
    return run.stdout
