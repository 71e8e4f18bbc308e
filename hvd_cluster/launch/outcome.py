"""How one worker ended, and what the driver makes of all outcomes.

The worker sends an :class:`Outcome` to the driver. :func:`collect` turns the outcomes of a job into its results, or
into one :class:`~hvd_cluster.errors.WorkerFailedError` for the failure that *caused* the others.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import site
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_cluster import errors
from hvd_cluster.errors import (
    HorovodInternalError,
    JoinUnsupportedError,
    LaunchError,
    RanksDisagreeError,
    WorkerFailedError,
    WorldEndedError,
)
from hvd_cluster.launch.pickling import Dumps, References, dumps, loads

logger = logging.getLogger(__name__)

#: Texts of errors that the network libraries raise on a rank whose peer has died. Errors of the user's own connections,
#: to a database or an object store, have the same texts but other types.
_PEER_LOST_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process has exited")
#: The packages of the RuntimeErrors of these libraries: gloo raises plain ones, torch.distributed its Dist*Error.
_NETWORK_PACKAGES = frozenset({"builtins", "torch", "jaxlib"})

#: The last line of a program that imports horovod where nothing serves it, and what its user can do.
_NO_HOROVOD_TEXT = "ModuleNotFoundError: No module named 'horovod'"
_NO_HOROVOD_REMEDY = (
    "hvd_cluster serves `import horovod` in programs that horovodrun or hvdrun --as-horovod starts, and in functions "
    "whose driver has imported hvd_cluster.compat."
)
#: Failed collectives that are errors of the program itself, not consequences of another rank's failure.
_CAUSES = (RanksDisagreeError, JoinUnsupportedError)
#: The names of the other errors in the last line of Python's output.
_PEER_LOST_ERRORS = frozenset({HorovodInternalError.__name__, WorldEndedError.__name__})


@dataclass(frozen=True)
class ErrorReport:
    """An exception as text, and as an object if it could be pickled.

    Every process can read the text.
    """

    #: The qualified name of its class, without ``builtins``.
    type_name: str
    message: str
    #: The traceback as Python prints it, starting at the first frame of the user's code.
    traceback_text: str
    #: The pickled exception; None if it cannot be pickled.
    pickled: bytes | None = None
    #: The worker only noticed that another one had ended the world.
    is_secondary: bool = False
    #: Objects that ``pickled`` refers to.
    references: References = ()

    @classmethod
    def of(cls, error: BaseException, dumps: Dumps = dumps) -> ErrorReport:
        """Describe ``error``, which may be broken; ``dumps`` pickles it."""
        pickled: bytes | None = None
        references: References = ()
        try:
            pickled, references = dumps(error)
        except Exception:  # noqa: BLE001 - reducing it runs user code, which may raise anything
            logger.debug("%s cannot be pickled", type(error).__name__)
        try:
            message = str(error)
        except Exception as broken:  # noqa: BLE001 - so does __str__
            message = f"<its __str__ raised {type(broken).__name__}>"
        return cls(
            _name_of(type(error)), message, _traceback_text(error), pickled, _is_peer_loss(error, message), references
        )

    def exception(self) -> BaseException | None:
        """The exception; None if it cannot be rebuilt in this process."""
        try:
            return self.rebuilt()
        except Exception as why:  # noqa: BLE001 - rebuilding it runs user code, which may raise anything
            logger.debug("the worker's %s cannot be rebuilt here: %s", self.type_name, why)
            return None

    def rebuilt(self) -> BaseException:
        """The exception.

        Raises:
            Exception: of any kind: it could not be pickled there, or cannot be rebuilt here.
        """
        if self.pickled is None:
            raise TypeError("it cannot be pickled")
        error = loads(self.pickled, self.references)
        if not isinstance(error, BaseException):
            raise TypeError(f"unpickling it gives {type(error).__qualname__}")
        return error


@dataclass(frozen=True)
class Outcome:
    """How the call on one rank ended."""

    rank: int
    host: str
    #: The pickled return value; None unless the function returned.
    value: bytes | None = None
    #: What the function raised, if it did.
    error: ErrorReport | None = None
    #: Exit code of the process if it says more than ``error``; a negative number is a signal.
    exit_code: int | None = None
    #: ``time.time()`` on the worker's host when the function ended, or on this host when the process was found dead.
    finished_at: float = 0.0
    #: The last lines of the worker's output.
    output_tail: str = ""
    #: The launcher stopped this worker because of another one, or because the user asked.
    stopped: bool = False
    #: How it ended, as the end of a sentence about the rank, if the launcher sees no exit code; otherwise empty.
    ending_text: str = ""
    #: Objects that ``value`` refers to.
    references: References = ()

    @property
    def ok(self) -> bool:
        """Whether the function returned and its result has arrived."""
        return self.error is None and self.value is not None

    @property
    def is_secondary(self) -> bool:
        """Whether this results from another failure.

        The launcher stopped the worker, or it noticed a peer's death.
        """
        if self.ok or self.stopped:
            return True
        if self.error is None:
            return self.exit_code == 1 and ends_in_peer_loss(self.output_tail)
        return self.error.is_secondary

    @property
    def is_own_fault(self) -> bool:
        """Whether the program raised or exited with an error.

        It was not killed by a signal or lost with its host.
        """
        return (self.exit_code or 0) > 0 or (self.error is not None and not self.ending_text)

    def ending(self) -> str:
        """How it ended, as the end of a sentence about the rank."""
        if self.ok:
            return "finished"
        if self.stopped:
            return "was stopped by the launcher"
        if self.error is not None and self.exit_code is None:
            return f"raised {self.error.type_name}"
        return self.ending_text or describe_exit(self.exit_code)


def _is_peer_loss(error: BaseException, message: str) -> bool:
    """Whether an error only says that another rank has failed."""
    if isinstance(error, HorovodInternalError):
        return not isinstance(error, _CAUSES)
    package = type(error).__module__.partition(".")[0]
    if not isinstance(error, RuntimeError) or package not in _NETWORK_PACKAGES:
        return False
    # A RuntimeError raised for an error of the user's own connection has that error as its context. That of a
    # DataLoader's process has only its text, below the first line.
    context = error.__cause__ or error.__context__
    return any(text in message.partition("\n")[0] for text in _PEER_LOST_TEXTS) and (
        context is None or _is_peer_loss(context, str(context))
    )


def ends_in_peer_loss(output: str) -> bool:
    """Whether a command's output ends with an error that another rank caused.

    Its last line is then Python's.
    """
    last = output.rpartition("\n")[2]
    return last.partition(":")[0].rpartition(".")[2] in _PEER_LOST_ERRORS


def describe_exit(exit_code: int | None) -> str:
    """How a process ended, as the end of a sentence.

    For example "exited with code 3" or "was killed by signal 9 (SIGKILL...)".
    """
    if exit_code is None:
        return (
            "ended with an unknown exit code: this program ignores SIGCHLD, or other code in it waits for every child"
        )
    if exit_code == 0:
        return "exited with code 0 before its function returned"
    if exit_code > 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "a real-time signal"
    hint = {"SIGKILL": ": killed, perhaps out of memory", "SIGSEGV": ": it crashed in native code"}.get(name, "")
    return f"was killed by signal {-exit_code} ({name}{hint})"


def first_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The failure that came first, or None.

    A rank that only noticed the end of another one comes after every real cause, whatever the clocks say: another
    rank's collective may notice a death before the launcher does.
    """
    failures = [outcome for outcome in outcomes if not outcome.ok]
    return min(failures, key=lambda outcome: (outcome.stopped, outcome.is_secondary, outcome.finished_at), default=None)


def collect(outcomes: Sequence[Outcome]) -> list[Any]:
    """The return values in the order of the ranks.

    Raises:
        WorkerFailedError: a worker failed. The message starts with the user's own traceback; ``__cause__`` is the
            user's exception if it could be rebuilt here.
        LaunchError: a result arrived but cannot be unpickled here.
    """
    failed = first_failure(outcomes)
    if failed is not None:
        cause, text = None, failure_text(failed, outcomes)
        if failed.error is not None:
            try:
                cause = failed.error.rebuilt()
            except Exception as why:  # noqa: BLE001 - see ErrorReport.exception()
                text += f"\n\nThis error has no __cause__: {failed.error.type_name} cannot be rebuilt here ({why})."
        died = failed.error is None or failed.is_secondary or bool(failed.ending_text)
        raise WorkerFailedError(text, failed.rank, failed.exit_code, died) from cause
    return [_value(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def failure_text(failed: Outcome, outcomes: Sequence[Outcome]) -> str:
    """The report of a failed job.

    Traceback, rank and host, how the others ended, the last output.
    """
    parts: list[str] = []
    if failed.error is not None:
        parts.append(failed.error.traceback_text.rstrip("\n"))
    ended = f"Rank {failed.rank} on host {failed.host} {failed.ending()}." + _others_text(failed, outcomes)
    last_line = (parts or [failed.output_tail])[0].rstrip().rpartition("\n")[2]
    parts.append(f"{ended}\n{_NO_HOROVOD_REMEDY}" if last_line == _NO_HOROVOD_TEXT else ended)
    if failed.output_tail:
        lines = "\n".join(f"  {line}" for line in failed.output_tail.splitlines())
        parts.append(f"Last output of rank {failed.rank}:\n{lines}")
    return "\n\n".join(parts)


def _others_text(failed: Outcome, outcomes: Sequence[Outcome]) -> str:
    """A sentence about the other ranks; may be empty.

    For example " Of the others, rank 1 finished; ranks 2, 3 raised ValueError.".
    """
    by_ending: dict[str, list[int]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.rank):
        if outcome.rank != failed.rank:
            by_ending.setdefault(outcome.ending(), []).append(outcome.rank)
    endings = [
        f"rank {ranges(ranks)} {how}" if len(ranks) == 1 else f"ranks {ranges(ranks)} {re.sub('^was ', 'were ', how)}"
        for how, ranks in by_ending.items()
    ]
    return f" Of the others, {'; '.join(endings)}." if endings else ""


def ranges(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs)


def _value(outcome: Outcome) -> Any:
    assert outcome.value is not None
    try:
        return loads(outcome.value, outcome.references)
    except Exception as why:  # unpickling runs user code and imports, which may raise anything
        raise LaunchError(
            f"the result of rank {outcome.rank} cannot be unpickled here ({type(why).__name__}: {why}): return plain "
            "data, or objects whose module the driver can import"
        ) from why


def _name_of(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ in {"builtins", "__main__"} else f"{cls.__module__}.{cls.__qualname__}"


def _traceback_text(error: BaseException) -> str:
    report = traceback.TracebackException.from_exception(error)
    for link in _chain(report, set()):
        link.stack = traceback.StackSummary.from_list(
            _relevant_frames(link.stack, link is report and _is_own_error(error))
        )
    return "".join(report.format())


def _is_own_error(error: BaseException) -> bool:
    """Whether this is one of our own errors.

    The frames of this package in which it was raised do not help the user.
    """
    return type(error).__module__ == errors.__name__


def _chain(report: traceback.TracebackException | None, seen: set[int]) -> Iterator[traceback.TracebackException]:
    """``report`` and every exception that caused it."""
    if report is None or id(report) in seen:
        return
    seen.add(id(report))
    yield report
    yield from _chain(report.__cause__, seen)
    yield from _chain(report.__context__, seen)
    for member in getattr(report, "exceptions", None) or ():  # of an ExceptionGroup, since Python 3.11
        yield from _chain(member, seen)


def _relevant_frames(frames: Sequence[traceback.FrameSummary], is_own_error: bool) -> list[traceback.FrameSummary]:
    """The frames from the user's first one on.

    If there is none, those from the first one outside of this package on.

    Args:
        frames: outermost first.
        is_own_error: leave out the frames below the user's last one.
    """
    own = [index for index, frame in enumerate(frames) if is_user_code(frame.filename)]
    others = [index for index, frame in enumerate(frames) if not is_own_package(frame.filename)]
    if is_own_error:
        return list(frames[own[0] : own[-1] + 1]) if own else []
    return list(frames[next(iter(own or others), 0) :])


_PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep


def is_own_package(file: str) -> bool:
    """Whether the file is part of this package."""
    return file.startswith(_PACKAGE_FOLDER)


def is_user_code(file: str) -> bool:
    """Whether the file is the user's.

    It is then a script, a notebook cell, or a module that is not installed.
    """
    return not is_own_package(file) and not file.startswith(("<frozen ", *_library_folders()))


def _library_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update([*site.getsitepackages(), site.getusersitepackages()])
    return tuple(folder for folder in folders if folder)
