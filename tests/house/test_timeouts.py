"""A test that reaches its time limit shows where its workers were."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANGING = """
import time
import pytest
from hvd_cluster.launch import local

def wait_for_the_others():
    import hvd_cluster.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        time.sleep(60)
    hvd.barrier()

@pytest.mark.timeout(20)
def test_that_hangs():
    local.run(wait_for_the_others, num_proc=2)
"""


def test_stacks_of_workers_are_shown_at_the_time_limit(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "leaks", "-p", "stacks_at_timeout", "-p", "no:cacheprovider", tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "plugins")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 1, run.stdout
    assert "Timeout (>20.0s) from pytest-timeout" in run.stdout
    for rank in (0, 1):
        assert re.search(rf"\[{rank}\]<stderr>: .* in wait_for_the_others", run.stdout), run.stdout
