"""Spares every process of the tests what Keras imports without need (see tests/startup), and a pool of compilers."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

STARTUP = Path(__file__).parents[1] / "startup"


def pytest_configure(config: pytest.Config) -> None:
    entries = [str(STARTUP), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # torch 2.4 starts a pool at import and leaves it
    runpy.run_path(str(STARTUP / "sitecustomize.py"))
