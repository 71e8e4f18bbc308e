"""The tests that torch ships for its backends, run on ours (docs/torch-backend.md, "Torch's own tests")."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("torchs_own_suite.py")
#: The tests that pass.
PASSING = set(Path(__file__).with_name("torchs_own_suite.txt").read_text().split())
#: The tests that fail, and what each failure says.
EXPLAINED = {
    # It compares the name of the backend.
    "test_get_backend": "'hvd' != 'gloo'",
    # torch allows this function for Gloo only.
    "test_monitored_barrier_gloo": "monitored_barrier is only implemented for GLOO backend",
    "test_monitored_barrier_gloo_subgroup": "monitored_barrier is only implemented for GLOO backend",
    # The same function of the group, which torch looks for in its own classes.
    "test_monitored_barrier_gloo_rank_0_timeout": "No backend type associated with device type cpu",
}
#: Those that need GPUs, NCCL or another number of ranks, on Gloo too.
NUM_SKIPPED = 195


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.needs("expecttest", "torch>=2.13,<2.14")  # each release has other tests
def test_the_tests_of_torch_that_pass_and_those_that_fail_are_known(tmp_path: Path) -> None:
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), str(tmp_path / "outcomes.json")]
    done = subprocess.run(
        command,
        env=os.environ | quiet,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    outcomes: dict[str, str] = json.loads((tmp_path / "outcomes.json").read_text())
    failed = {name: text for name, text in outcomes.items() if text not in ("passed", "skipped")}
    unexplained = {
        name: text for name, text in failed.items() if not re.search(EXPLAINED.get(name, "does not fail"), text)
    }
    assert unexplained == {}, "\n\n".join(unexplained.values())
    assert sorted(failed) == sorted(EXPLAINED)
    assert {name for name, text in outcomes.items() if text == "passed"} == PASSING
    assert list(outcomes.values()).count("skipped") == NUM_SKIPPED
