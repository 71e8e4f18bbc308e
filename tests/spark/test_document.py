"""The scripts that docs/spark.md shows print what their comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
#: File name, from the first line of the block -> the block.
SCRIPTS = dict(re.findall(r"```python\n(?=# ([\w.]+)\n)(.*?)```", TEXT, flags=re.DOTALL))
#: Those of the estimators are run by the estimators' tests.
OURS = ("run.py", "elastic.py", "runner.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.spark("local")  # each has a session of its own
@pytest.mark.parametrize("name", OURS)
def test_a_script_of_the_guide_prints_what_its_comments_say(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SCRIPTS[name])
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    expected = re.findall(r"^print\(.*\)  # (.*)$", SCRIPTS[name], flags=re.MULTILINE)
    assert expected
    assert [line for line in printed if line in expected] == expected, done.stdout
