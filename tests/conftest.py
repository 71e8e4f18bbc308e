"""What every test gets: the command-line options of the suite."""

from __future__ import annotations

import pytest

SPARK_MASTERS = ("local", "local-cluster", "connect", "standalone")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spark-master",
        choices=SPARK_MASTERS,
        default="local",
        help="the kind of Spark session that the `spark`-marked tests of this run use (one kind per process)",
    )
