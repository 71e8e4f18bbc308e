"""The public names of hvd_cluster, and how each is called, are those of the record."""

from __future__ import annotations

import difflib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_public_names_and_signatures_are_those_of_the_record() -> None:
    missing = [name for name in ("tensorflow", "keras", "lightning", "pyspark", "ray") if not find_spec(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    printed = subprocess.run(
        [sys.executable, HERE / "public_api.py"], capture_output=True, text=True, check=False, timeout=110
    )
    assert printed.returncode == 0, printed.stderr
    record = (HERE / "public_api.txt").read_text()
    changes = difflib.unified_diff(
        record.splitlines(), printed.stdout.splitlines(), "recorded", "found", n=0, lineterm=""
    )
    assert not (text := "\n".join(changes)), (
        f"{text}\nIf the change is meant: describe it in its docstring, docs/ and CHANGELOG.md, then "
        "python tests/house/public_api.py > tests/house/public_api.txt"
    )
