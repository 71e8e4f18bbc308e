"""Spares every process of the tests the packages that Keras imports without need (see tests/startup)."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

STARTUP = Path(__file__).parents[1] / "startup"


def pytest_configure(config: pytest.Config) -> None:
    entries = [str(STARTUP), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    runpy.run_path(str(STARTUP / "sitecustomize.py"))
