"""Loads what every test gets: each file of ``tests/plugins`` is a pytest plugin."""

from __future__ import annotations

from pathlib import Path

#: ``tests/plugins`` is on the path by pyproject.toml's ``pythonpath``: no folder of the suite is a package.
pytest_plugins = sorted(file.stem for file in (Path(__file__).parent / "plugins").glob("*.py"))
