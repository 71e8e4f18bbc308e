"""Skips a test whose ``needs("torch>=2.6")`` names a distribution, or a release of it, that is not installed."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement


def missing(requirement: str) -> str | None:
    """What is installed instead of ``requirement``; None if it is met."""
    wanted = Requirement(requirement)
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"needs {requirement}, which is not installed"
    if wanted.specifier.contains(version, prereleases=True):
        return None
    return f"needs {requirement}, and {version} is installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("needs"):
            reasons = [reason for reason in map(missing, marker.args) if reason is not None]
            if reasons:
                item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))
