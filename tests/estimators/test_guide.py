"""The program that docs/estimators.md consists of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "estimators.md"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_blocks_of_the_guide_run_in_order(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 8
    (tmp_path / "guide.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "validation_loss" in done.stdout
    assert "1,601 rows to train on and 399 to validate on" in done.stderr
    assert "processes of this machine" in done.stderr
