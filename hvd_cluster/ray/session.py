"""The Ray cluster that this process is connected to."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from hvd_cluster.errors import LaunchError, MissingExtraError
from hvd_cluster.launch.environment import answer_for_horovod

logger = logging.getLogger(__name__)

#: What Ray calls in each new worker process.
_HOOK = f"{answer_for_horovod.__module__}.{answer_for_horovod.__qualname__}"
_THREE_WAYS_IN = (
    "Ray clusters ask for a token by default. This process joins with the token of the machine that started the "
    "cluster: the same home folder (~/.ray/auth_token), or the environment variable RAY_AUTH_TOKEN with the token, or "
    "RAY_AUTH_TOKEN_PATH with a file that holds it, and RAY_AUTH_MODE=token."
)


def load_ray() -> Any:
    """The package ``ray``.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "to run workers on a Ray cluster") from error
    return ray


def connect(address: str | None = None) -> Any:
    """The package ``ray``, connected: to the cluster that the program has chosen, or as ``ray.init()`` does by default.

    Args:
        address: where to connect if the program has not; None for what RAY_ADDRESS says, or else a new local cluster.

    Raises:
        LaunchError: there is no way in; where a token may be missing or wrong, the text says how one is given.
    """
    ray = load_ray()
    if ray.is_initialized():
        return ray
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Ray's own, about the accelerator variables of its workers
            ray.init(address=address)
    except getattr(ray.exceptions, "AuthenticationError", ()) as error:  # Ray 2.40 has no tokens
        raise LaunchError(f"the Ray cluster refused this process: {first_line(error)}. {_THREE_WAYS_IN}") from error
    except ConnectionError as error:
        raise LaunchError(
            f"no way into the Ray cluster: {first_line(error)}. If its address is right, the token may be wrong. "
            f"{_THREE_WAYS_IN}"
        ) from error
    return ray


def runtime_env(base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A ``runtime_env`` for ``ray.init`` under which ``import horovod`` resolves in all of the job's processes.

    :class:`RayExecutor` and ``hvd_cluster.ray.run`` need none: their workers do what the driver does. Workers that
    other libraries start, such as those of ``ray.train.horovod``, do not know ``horovod`` otherwise.

    Args:
        base: entries of your own, such as ``pip`` or ``env_vars``.

    Raises:
        ValueError: ``base`` has a ``worker_process_setup_hook``, of which Ray takes one.
    """
    given = dict(base or {})
    if given.get("worker_process_setup_hook") not in (None, _HOOK):
        raise ValueError(
            f"worker_process_setup_hook={given['worker_process_setup_hook']!r} is set already, and Ray takes one: "
            "import hvd_cluster.compat in that function, and leave out hvd_cluster.ray.runtime_env()"
        )
    return {**given, "worker_process_setup_hook": _HOOK}


def is_client() -> bool:
    """Whether this process talks to its cluster through Ray Client (``ray.init("ray://...")``)."""
    if "ray" not in sys.modules:
        return False
    from ray.util.client import ray as client

    return bool(client.is_connected())


def refuse_client(what: str) -> None:
    """Raise in a process that is only a Ray Client: workers and their driver call each other.

    Raises:
        LaunchError: it is one.
    """
    if is_client():
        raise LaunchError(
            f"{what} does not work through Ray Client: use RayExecutor, which moves into the cluster, or run the "
            "program there (ray job submit)"
        )


def full_store(what: str, error: BaseException) -> LaunchError | None:
    """The error for what did not fit into Ray's object store; None where ``error`` says something else.

    Args:
        what: the beginning of the sentence.
        error: what Ray raised.
    """
    ray = load_ray()
    if not isinstance(error, (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)):
        return None
    return LaunchError(
        f"{what} found no room: the object store of a Ray node is full, and so is the disk behind it "
        f"({first_line(error)}). Pass large data through files that the workers read and write, or give Ray more room "
        "(ray start --object-store-memory=..., a larger disk under --temp-dir); `ray memory` lists what takes it."
    )


def first_line(error: BaseException) -> str:
    """What an error says, without its story."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).strip().rstrip(".")
