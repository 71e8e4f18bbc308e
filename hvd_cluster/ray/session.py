"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_cluster.data.optional import load_extra
from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.environment import enable_horovod_import

#: The function that Ray calls in each new worker process.
_HOOK = f"{enable_horovod_import.__module__}.{enable_horovod_import.__qualname__}"
_TOKEN_HELP = (
    "Ray clusters ask for a token by default. This process joins with the token of the machine that started the "
    "cluster: the same home folder (~/.ray/auth_token), or the environment variable RAY_AUTH_TOKEN with the token, or "
    "RAY_AUTH_TOKEN_PATH with a file that holds it, and RAY_AUTH_MODE=token."
)


def load_ray() -> Any:
    """The package ``ray``.

    Raises:
        MissingExtraError: it is not installed.
    """
    return load_extra("ray", "ray", "to run workers on a Ray cluster")


def connect(address: str | None = None) -> Any:
    """Connect to Ray, and return the package ``ray``; an existing connection is kept.

    Args:
        address: where to connect if the program has not; None for RAY_ADDRESS, or else a new local cluster.

    Raises:
        LaunchError: it cannot connect; if a token may be missing or wrong, the message says how to set one.
    """
    ray = load_ray()
    if ray.is_initialized():
        return ray
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from Ray, about the accelerator variables of its workers
            ray.init(address=address)
    except getattr(ray.exceptions, "AuthenticationError", ()) as error:  # Ray 2.40 has no tokens
        raise LaunchError(f"the Ray cluster refused this process: {first_line(error)}. {_TOKEN_HELP}") from error
    except ConnectionError as error:
        raise LaunchError(
            f"cannot connect to the Ray cluster: {first_line(error)}. If its address is right, the token may be wrong. "
            f"{_TOKEN_HELP}"
        ) from error
    return ray


def runtime_env(base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A ``runtime_env`` that makes ``import horovod`` work in a job's processes.

    It is for ``ray.init``. :class:`RayExecutor` and ``hvd_cluster.ray.run`` do not need it: their workers do what the
    driver does. Workers of other libraries, such as ``ray.train.horovod``, do not know ``horovod`` otherwise.

    Args:
        base: entries of your own, such as ``pip`` or ``env_vars``.

    Raises:
        ValueError: ``base`` already has a ``worker_process_setup_hook``; Ray accepts only one.
    """
    given = dict(base or {})
    if given.get("worker_process_setup_hook") not in (None, _HOOK):
        raise ValueError(
            f"worker_process_setup_hook={given['worker_process_setup_hook']!r} is set, and Ray accepts only one: "
            "import hvd_cluster.compat in that function, and leave out hvd_cluster.ray.runtime_env()"
        )
    return {**given, "worker_process_setup_hook": _HOOK}


def is_client() -> bool:
    """Whether this process uses its cluster through Ray Client.

    It has then called ``ray.init("ray://...")``.
    """
    if "ray" not in sys.modules:
        return False
    from ray.util.client import ray as client

    return bool(client.is_connected())


def refuse_client(what: str) -> None:
    """Raise in a process that is only a Ray Client.

    Workers and their driver connect to each other.

    Raises:
        LaunchError: this process is a Ray Client.
    """
    if is_client():
        raise LaunchError(
            f"{what} does not work through Ray Client: use RayExecutor, which runs in the cluster, or run the "
            "program there (ray job submit)"
        )


def is_loss(error: BaseException) -> bool:
    """Whether Ray raises an error because it has lost an actor.

    The actor died, cannot start, or cannot be reached.
    """
    errors = load_ray().exceptions
    lost = (
        errors.RayActorError,
        errors.ActorPlacementGroupRemoved,
        errors.ActorUnschedulableError,
        errors.NodeDiedError,
        errors.OutOfMemoryError,
        errors.WorkerCrashedError,
    )
    return isinstance(error, lost) and not isinstance(error, errors.RayTaskError)  # which a task itself has raised


def full_store(what: str, error: BaseException) -> LaunchError | None:
    """The error for an object that did not fit into Ray's object store.

    None if ``error`` has another cause.
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
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).strip().rstrip(".")


#: Why there are no workers any more, as part of a sentence.
ENDED = "this program's connection to Ray has ended (ray.shutdown())"
#: How a worker ended, as the end of a sentence about its rank.
ENDING_TEXT = "ended with this program's connection to Ray (ray.shutdown())"


class ConnectionEndedError(ConnectionError):
    """The program has called ``ray.shutdown()``, and perhaps ``ray.init()`` after it."""


@dataclass(frozen=True)
class Connection:
    """This process's connection to Ray, which ends with ``ray.shutdown()``.

    A later ``ray.init()`` makes another one with new actors and objects. Ray does not check this: without a connection
    its functions start a new cluster, and the program's next ``ray.init()`` fails; a handle or a reference of an
    earlier connection may even end the process.
    """

    #: The node of this process, whose id Ray never uses twice; empty without a connection.
    node_id: str = ""
    job_id: str = ""

    @classmethod
    def current(cls) -> Connection:
        """The present connection."""
        ray = load_ray()
        if not ray.is_initialized():
            return cls()
        # Not ray.get_runtime_context, which would connect if another thread ended the connection at this moment.
        context = ray.runtime_context.get_runtime_context()
        try:
            return cls(context.get_node_id(), context.get_job_id())
        except Exception:  # whatever Ray raises during a shutdown
            if ray.is_initialized():
                raise
            return cls()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or there was none."""
        return not self.node_id or self != self.current()

    def ray(self) -> Any:
        """The package ``ray``, for use with objects of this connection.

        Raises:
            ConnectionEndedError: it has ended.
        """
        if self.has_ended:
            raise ConnectionEndedError(ENDED)
        return load_ray()
