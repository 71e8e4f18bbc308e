"""The guides as HTML: no broken link, no page that is missing from the navigation."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs: make docs installs it")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site" / "api" / "torch.html").read_text()
    assert "DistributedOptimizer" in page
    assert "backward_passes_per_step" in page
