"""The rules for arguments that ``run`` and ``run_elastic`` share, with one text each."""

from __future__ import annotations

from typing import Any

from hvd_cluster.errors import LaunchError
from hvd_cluster.spark.session import Session


def wrong_seconds(**given: float | None) -> list[str]:
    """What is wrong with numbers of seconds, by the names of their arguments: a sentence each, or nothing."""
    return [
        f"{name}={value!r} must be more than 0 seconds"
        for name, value in given.items()
        if value is not None and not value > 0
    ]


def check_profile(session: Session, profile: Any) -> None:
    """Refuse a resource profile where Spark cannot take one.

    Raises:
        LaunchError: Spark is older than 4.0.
    """
    if profile is not None and not session.takes_profiles():
        raise LaunchError(
            f"resource_profile needs Spark 4.0 or newer, and this is {session.spark.version}: say what a task needs in "
            "the session's settings instead (spark.task.cpus, spark.task.resource.gpu.amount)"
        )
