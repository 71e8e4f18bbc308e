"""The rules for arguments that ``run`` and ``run_elastic`` share, with one text each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_cluster.errors import LaunchError
from hvd_cluster.spark.session import Session

logger = logging.getLogger(__name__)


def wrong_seconds(**given: float | None) -> list[str]:
    """What is wrong with numbers of seconds, by the names of their arguments: a sentence each, or nothing."""
    return [
        f"{name}={value!r} must be more than 0 seconds"
        for name, value in given.items()
        if value is not None and not value > 0
    ]


def wrong_variables(env: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with variables for the workers: nothing, or one sentence."""
    no_text = sorted(n for n, value in (env or {}).items() if value is not None and not isinstance(value, str))
    return (
        [f"env: the values of {', '.join(no_text)} must be strings, or None to remove the variable"] if no_text else []
    )


def interface_names(nics: str | Sequence[str] | set[str] | None) -> tuple[str, ...]:
    """The network interfaces of ``nics``, a set of names or one text with commas."""
    names = nics.split(",") if isinstance(nics, str) else sorted(nics or ())
    return tuple(name.strip() for name in names if name.strip())


def interface_variables(names: Sequence[str]) -> dict[str, str]:
    """What lets a worker take the first of the interfaces."""
    if len(names) > 1:
        logger.warning("of nics=%s only %s is used", ",".join(names), names[0])
    return {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": names[0]} if names else {}


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
