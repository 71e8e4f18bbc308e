"""What ``needs("package>=1")`` skips."""

from __future__ import annotations

from importlib import metadata

from needs import missing


def test_what_is_missing_or_too_old_is_named() -> None:
    version = metadata.version("pytest")
    assert missing("pytest>=1") is None
    assert missing("pytest>=9999") == f"needs pytest>=9999, and {version} is installed"
    assert missing("no-such-package") == "needs no-such-package, which is not installed"
