"""Which Spark tests run: ``--spark-master`` picks the session kind of this process.

``@pytest.mark.spark`` can run with every kind, ``@pytest.mark.spark("standalone")`` only with those it names. ``make
test`` runs a test with the first of its kinds; with the others it is slow, unless ``@pytest.mark.each_kind`` says that
it is what a kind stands or falls by. One process holds one kind of session: a classic and a Connect session do not live
together, and each is started once.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess

import pytest

KINDS = ("local", "local-cluster", "connect", "standalone")
OLDEST_JAVA = 17


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spark-master",
        choices=KINDS,
        default="local",
        help="the kind of Spark session that the `spark`-marked tests of this run use (one kind per process)",
    )


@pytest.hookimpl(tryfirst=True)  # before -m looks for "slow"
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kind = config.getoption("--spark-master")
    kept: list[pytest.Item] = []
    other_kinds: list[pytest.Item] = []
    for item in items:
        kinds = _kinds(item)
        (other_kinds if kinds and kind not in kinds else kept).append(item)
        if kinds and kind != kinds[0] and not item.get_closest_marker("each_kind"):
            item.add_marker(pytest.mark.slow)
    if other_kinds:
        config.hook.pytest_deselected(items=other_kinds)
        items[:] = kept
    spark_tests = [item for item in items if item.get_closest_marker("spark")]
    if spark_tests and (reason := _why_no_spark()):
        for item in spark_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


def _kinds(item: pytest.Item) -> tuple[str, ...]:
    """The kinds that the test can run with, the usual one first; none for a test without Spark."""
    marker = item.get_closest_marker("spark")
    if marker is None:
        return ()
    kinds: tuple[str, ...] = marker.args or KINDS
    if unknown := set(kinds) - set(KINDS):
        raise pytest.UsageError(f"{item.nodeid}: unknown Spark session kind {sorted(unknown)}; there are {KINDS}")
    return kinds


def _why_no_spark() -> str:
    """The reason to skip every Spark test here, or ""."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: pip install '.[spark]'"
    home = os.environ.get("JAVA_HOME", "")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    package = f"on Debian: apt-get install openjdk-{OLDEST_JAVA}-jre-headless"
    if java is None:
        return f"no Java, which Spark needs; {package}"
    banner = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(?:1\.)?(\d+)', banner)
    if version is None or int(version[1]) < OLDEST_JAVA:
        return f"Java {version[1] if version else '(unknown)'} is older than Spark's {OLDEST_JAVA}; {package}"
    return ""
