"""What the driver sends to every barrier task, and the tasks' messages to it."""

from __future__ import annotations

import importlib.metadata
import pickle
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

import hvd_cluster
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent
from hvd_cluster.rendezvous import secret

#: From the driver to a task: stop your workers.
STOP = b"stop"


@dataclass(frozen=True)
class TaskStarted:
    """A barrier task is running; ``index`` is its partition."""

    index: int
    host: str


@dataclass(frozen=True)
class RanksAssigned:
    """The task knows its workers' ranks and starts them.

    ``host`` is the address for the other workers.
    """

    index: int
    ranks: tuple[int, ...]
    host: str


@dataclass(frozen=True)
class TaskWarning:
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class WorkerEnded:
    """A worker ended.

    The outcome has no value; the value arrives as a row of the job.
    """

    outcome: Outcome


@dataclass(frozen=True)
class TaskLost:
    """A task's connection to the driver or to another task ended.

    Its workers have finished, or its executor died.
    """

    index: int


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions that must agree between the driver and the workers.

    A version is empty if its package is not installed.
    """

    python: str
    torch: str
    hvd_cluster: str

    @classmethod
    def here(cls) -> Versions:
        """The versions in this process, without importing the packages."""
        return cls(python=platform.python_version(), torch=_version("torch"), hvd_cluster=hvd_cluster.__version__)


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """A job, as its tasks see it."""

    #: Workers that each task runs.
    workers_per_task: int
    #: Distinguishes jobs that run at the same time.
    job_id: str
    #: The job's secret; it is part of the pickled task and is never shown.
    secret: bytes = field(repr=False)
    #: "host:port" candidates for the connection to the driver.
    driver_addresses: tuple[str, ...]
    #: Additional environment variables for the workers; None removes a variable.
    env: Mapping[str, str | None]
    #: The Python that runs the workers; None for the task's own.
    executable: str | None
    #: ``import horovod`` works in the workers, as it does in the driver.
    as_horovod: bool
    #: The driver's versions.
    versions: Versions


def sign(outcome: Outcome, slot: int, job_secret: bytes) -> bytes:
    """``outcome`` of that slot as signed bytes for :func:`verify`."""
    return secret.sign(job_secret, _label(slot), pickle.dumps(outcome))


def verify(signed: bytes, slot: int, job_secret: bytes) -> Outcome:
    """The signed outcome; the signature is checked before anything is unpickled.

    Raises:
        AuthenticationError: the bytes were not signed with that secret, or for another slot.
    """
    outcome: Outcome = pickle.loads(secret.verify(job_secret, _label(slot), signed))
    return outcome


def _label(slot: int) -> str:
    return f"the outcome of slot {slot}"


def disagreements(driver: Versions, tasks: Mapping[str, Versions]) -> tuple[list[str], list[str]]:
    """Compare the versions of the driver and of the tasks, which are given by host.

    Returns:
        Errors, with which the job cannot run; and warnings.
    """
    errors, warnings = [], []
    for host, task in tasks.items():
        if _minor(task.python) != _minor(driver.python):
            errors.append(
                f"Python is {driver.python} on the driver, but {task.python} on {host}: pickled functions need the "
                "same minor version; set PYSPARK_PYTHON (or spark.pyspark.python) to it"
            )
        if task.hvd_cluster != driver.hvd_cluster:
            errors.append(
                f"hvd-cluster is {driver.hvd_cluster or 'not installed'} on the driver, but "
                f"{task.hvd_cluster or 'not installed'} on {host}: install the same version on both"
            )
        if driver.torch and task.torch and _minor(task.torch) != _minor(driver.torch):
            warnings.append(f"torch is {driver.torch} on the driver, but {task.torch} on {host}")
    by_torch = {_minor(task.torch): host for host, task in tasks.items()}
    if len(by_torch) > 1:
        listed = ", ".join(f"{version or 'none'} on {host}" for version, host in by_torch.items())
        errors.append(f"the workers have different versions of torch: {listed}; install one version on all of them")
    return errors, warnings


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


#: What a task sends.
Message = TaskStarted | RanksAssigned | TaskWarning | OutputLine | ProgressEvent | WorkerEnded | TaskLost
