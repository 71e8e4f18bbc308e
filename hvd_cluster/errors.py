"""The exceptions of hvd_cluster, as one tree.

::

    RuntimeError
    ├── HorovodInternalError        a collective failed; an elastic job restores and continues
    │   ├── RanksDisagreeError      ranks submitted different requests under one name; the world stays
    │   ├── JoinUnsupportedError    a rank has joined, and the operation needs data of every rank; the world stays
    │   └── WorldEndedError         a rank died, failed or shut down: every later operation fails too
    ├── GradientChangedError        a gradient was changed or replaced before it was reduced
    ├── HostsUpdatedInterrupt       the set of hosts changed; an elastic job re-initialises
    └── LaunchError                 workers could not be started or did not finish
        ├── NotEnoughSlotsError     the cluster has fewer slots than the job needs
        ├── StartTimeoutError       the slots exist, but no worker reported in time
        └── WorkerFailedError       a worker raised, exited or was killed
    ValueError
    ├── NotInitializedError         an operation before ``hvd.init()``
    ├── UnsupportedReductionError   an operation does not support this ``op``; also a RuntimeError
    ├── DuplicateNameError          this rank's operation of the same name has not ended
    └── DataError                   the data, its schema or its store does not fit the job
        └── RunInUseError           another program is fitting the same run of a store
    ImportError
    ├── HorovodVersionMismatchError kept for programs that catch it; never raised
    └── MissingExtraError           an optional dependency is not installed
    ConnectionError
    ├── AuthenticationError         a peer does not know the job's secret
    └── StaleWorldError             this process belongs to an earlier world of an elastic job
"""

from __future__ import annotations

from typing import Any

SHUT_DOWN_TEXT = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)
NOT_INITIALIZED_TEXT = "Horovod has not been initialized; use hvd.init()."
DUPLICATE_NAME_TEXT = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
    "currently being processed.  If you want to request another tensor, use a different tensor name."
)


class HorovodInternalError(RuntimeError):
    """A collective failed.

    A peer died, the ranks disagreed, or the job was shut down.
    """


class RanksDisagreeError(HorovodInternalError):
    """Ranks submitted different requests under one name.

    Tensors of different shapes, for example. The world stays usable.
    """


class JoinUnsupportedError(HorovodInternalError):
    """A rank has joined, and the operation needs data of every rank.

    The world stays usable.
    """


class WorldEndedError(HorovodInternalError):
    """The world has ended, so every later operation fails too.

    A rank died, failed or shut down.
    """


class GradientChangedError(RuntimeError):
    """A gradient was changed or replaced while it was being reduced.

    The text names the parameter and the step. The rank on which this happened raises it; the job ends with
    :class:`HorovodInternalError` on the others.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed.

    Args:
        skip_sync: True if hosts were only removed, so that the state is still equal on the remaining ranks.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The framework is not the one that Horovod was built with.

    Never raised: nothing is compiled.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(name, version, installed_version)
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __str__(self) -> str:
        return f"built with {self.name} {self.version}, but {self.installed_version} is installed"


class NotInitializedError(ValueError):
    """``hvd.init()`` was not called, or ``hvd.shutdown()`` was."""

    def __init__(self, text: str = NOT_INITIALIZED_TEXT) -> None:
        super().__init__(text)


class UnsupportedReductionError(ValueError, RuntimeError):
    """A collective does not support this ``op``; also a RuntimeError, as in Horovod."""


class DuplicateNameError(ValueError):
    """A name is in use by an operation of this rank that has not ended."""


class DataError(ValueError):
    """The data, its schema or its store does not fit the job.

    The text names the column or path.
    """


class RunInUseError(DataError):
    """Another program is fitting the same ``run_id`` of a store.

    The text names its host and process.
    """


class LaunchError(RuntimeError):
    """Workers could not be started, or did not all finish."""


class NotEnoughSlotsError(LaunchError):
    """The cluster has fewer slots than the job needs."""


class StartTimeoutError(LaunchError, TimeoutError):
    """Not all workers reported within the start timeout."""


class WorkerFailedError(LaunchError):
    """A worker raised, exited or was killed.

    Args:
        text: the user's traceback, then rank, host and log location.
        rank: the rank that failed first; None if it is unknown.
        exit_code: its exit code; the negative number of the signal that ended it; None after an exception.
        died: a process or a connection was lost, without an exception of the user's code: the same call may
            succeed if it is repeated.
    """

    def __init__(self, text: str, rank: int | None = None, exit_code: int | None = None, died: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.exit_code = exit_code
        self.died = died

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.rank, self.exit_code, self.died))


class AuthenticationError(ConnectionError):
    """A peer could not prove that it knows the job's secret."""


class StaleWorldError(ConnectionError):
    """This process belongs to an earlier generation of an elastic job.

    The current one refuses it.
    """


class MissingExtraError(ImportError):
    """An optional dependency is not installed.

    Args:
        package: the package that is missing.
        extra: the extra of hvd-cluster that installs it, in a supported version.
        purpose: what it is needed for, as the end of "needed ...".
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(package, extra, purpose)
        self.package = package
        self.extra = extra
        self.purpose = purpose

    def __str__(self) -> str:
        return (
            f"{self.package} is not installed, but is needed {self.purpose}: install hvd_cluster with its extra "
            f"[{self.extra}], in a checkout by pip install '.[{self.extra}]'"
        )
