"""What a thread or a process is doing now, as text for a report about a hang."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from hvd_cluster.monitor.activities import describe_activities

#: How many calls of the user's code are shown, the innermost ones.
_MAX_CALLS = 6
_MAX_LINE_CHARACTERS = 100

_PACKAGE = str(Path(__file__).parents[2])
#: How the engine waits, and how this module looks, does not help.
_OWN = ("hvd_cluster/engine/", "hvd_cluster/monitor/stacks.py")
#: Calls the user's function. Its own callers are how a worker starts: ``python -c`` has the file "<string>".
WORKER = "hvd_cluster/launch/worker.py"
#: How the names of threads begin that read data or run the user's functions on them.
_READERS = ("hvd-reader", "hvd-preprocess", "hvd-async-loader", "hvd-to-device")
#: Kernel states of a process that does not run; see proc_pid_stat(5).
_PROCESS_STATES = {
    "T": "it is stopped (SIGSTOP or SIGTSTP)",
    "t": "it is stopped by a debugger",
    "D": "it waits for a disk, swap space or a network file system",
    "Z": "it has ended",
    "X": "it has ended",
}


def user_stack(submitter: int | None = None) -> str:
    """Where the main thread is: the user's lines, innermost first.

    And what they call.

    Args:
        submitter: the thread that has submitted operations last; shown instead if only it runs code of the user.

    Example::

        train.py:41 in train: for batch in loader:
            in ParquetReader.__next__ (hvd_cluster/data/reader.py:281) ... Condition.wait (threading.py:331)
        train.py:88 in main: train(model)
        hvd-reader-0 has been reading row group 3 of s3://b/x for 58.1 s
        hvd-reader-1 is in resize (train.py:12)
    """
    frames = sys._current_frames()
    try:
        stacks = [_stack(frames[thread]) for thread in (threading.main_thread().ident, submitter) if thread in frames]
        threads = describe_threads()
    except Exception as error:  # noqa: BLE001 - a loader of the user's modules may raise anything; the engine must continue
        stacks = [([f"(its stack cannot be shown: {type(error).__name__}: {error})"], True)]
        threads = describe_activities()
    frames.clear()  # it refers to this function's frame, which refers to it
    lines = next((lines for lines, has_user_code in stacks if has_user_code), stacks[0][0] if stacks else [])
    return "\n".join([*lines, *threads])


def describe_threads() -> list[str]:
    """What the threads that prepare data do: files, and the user's lines.

    The lines are of the user's functions.
    """
    calls = reader_calls(sys._current_frames())
    return [
        *describe_activities(),
        *(f"{name} is in {code_name(of.f_code)} ({shown_path(of.f_code)}:{of.f_lineno})" for name, of in calls),
    ]


def reader_calls(frames: Mapping[int, FrameType]) -> Iterator[tuple[str, FrameType]]:
    """The threads that prepare data and run user code now, each with its frame.

    It is the innermost frame of that code.

    Args:
        frames: the innermost frame of each thread.
    """
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0) if thread.name.startswith(_READERS) else None
        while frame is not None:
            path = frame.f_code.co_filename
            if library_path(path) is None and path != "<string>":  # a library has generated that one
                break
            frame = frame.f_back
        if frame is not None:
            yield thread.name, frame


def process_state(pid: int) -> str:
    """What keeps process ``pid`` of this host from running; "" if nothing does."""
    try:
        # The name of the program, in parentheses, may contain spaces and parentheses.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "it has ended" if Path("/proc/self/stat").exists() else ""
    return _PROCESS_STATES.get(state, "")


def _stack(frame: FrameType | None) -> tuple[list[str], bool]:
    """The lines for a thread of an innermost frame, and if any is the user's."""
    lines: list[str] = []
    num_calls = 0
    library_calls: list[str] = []
    while frame is not None:
        path = library_path(frame.f_code.co_filename)
        if path is not None:
            if not path.startswith(_OWN):
                library_calls.append(f"{code_name(frame.f_code)} ({path}:{frame.f_lineno})")
            if path == WORKER:
                break
        else:
            num_calls += 1
            if num_calls <= _MAX_CALLS:
                lines += [_user_line(frame), *_folded(library_calls)]
            library_calls = []
        frame = frame.f_back
    if num_calls > _MAX_CALLS:
        lines.append(f"... and {num_calls - _MAX_CALLS} calls more")
    return lines or _folded(library_calls), num_calls > 0


def _folded(calls: list[str]) -> list[str]:
    """The outermost and the innermost of calls within libraries."""
    return [f"    in {' ... '.join(dict.fromkeys([calls[-1], calls[0]]))}"] if calls else []


def _user_line(frame: FrameType) -> str:
    text = f"{shown_path(frame.f_code)}:{frame.f_lineno} in {code_name(frame.f_code)}"
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    if len(code) > _MAX_LINE_CHARACTERS:
        code = code[:_MAX_LINE_CHARACTERS] + "..."
    return f"{text}: {code}" if code else text


def shown_path(code: CodeType) -> str:
    """The file of the code, relative to the working directory if it is below it."""
    path = Path(code.co_filename)
    with suppress(OSError, ValueError):  # the working directory is gone, or the file is not below it
        path = path.relative_to(Path.cwd())
    return str(path)


def code_name(code: CodeType) -> str:
    """The name of a function with that of its class, before Python 3.11 without it."""
    name: str = getattr(code, "co_qualname", code.co_name)
    return name


@cache
def library_path(path: str) -> str | None:
    """The path of a library's file below its folder, or None for a file of the user."""
    if "/torchinductor_" in path or path.startswith("<eval_with_key>"):  # compiled by torch from the user's code
        return path
    if path.startswith(("<frozen ", f"{_PACKAGE}/hvd_cluster/")):
        return path.removeprefix(f"{_PACKAGE}/")
    for library in _libraries():
        if path.startswith(f"{library}/"):
            return path.removeprefix(f"{library}/")
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    return None


@cache
def _libraries() -> list[str]:
    """Where code that the user has not written is installed, the longer paths first."""
    names = ("purelib", "platlib", "stdlib", "platstdlib")
    return sorted({sysconfig.get_path(name) for name in names}, key=len, reverse=True)
