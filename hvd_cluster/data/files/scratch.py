"""Local folders that are removed with their process, even if it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "hvd-"
#: A folder that its process has not locked yet.
_NEW_PREFIX = "hvd-new-"
#: A name that no other kind of folder has: a ``DiskCache("/tmp/hvd-...")`` holds a lock too, and not all the time.
_LOCK = ".hvd-scratch"
_LOCKED_WITHIN_S = 60.0


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[str]:
    """A folder for the context, or for as long as this process lives.

    It holds a lock, ``.hvd-scratch``, and has its name once it has that, so that no other process sweeps it. Before
    that it sweeps what killed processes have left, of any kind.
    """
    _sweep()
    new = Path(tempfile.mkdtemp(prefix=f"{_NEW_PREFIX}{kind}-"))  # only this user can enter it
    folder = new.with_name(new.name.replace(_NEW_PREFIX, _PREFIX, 1))
    try:
        with (new / _LOCK).open("w") as lock:
            with contextlib.suppress(OSError):  # a filesystem without locks, where no process can sweep either
                fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(folder)
            yield str(folder)
    finally:
        for left in (new, folder):
            shutil.rmtree(left, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders of processes that were killed: their locks are free."""
    scratch = Path(tempfile.gettempdir())
    for lock in scratch.glob(f"{_PREFIX}*/{_LOCK}"):
        if lock.parent.name.startswith(_NEW_PREFIX):
            continue
        with contextlib.suppress(OSError), lock.open("r+") as file:  # it is being removed, or belongs to another user
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    for new in scratch.glob(f"{_NEW_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - new.stat().st_mtime > _LOCKED_WITHIN_S:
                shutil.rmtree(new, ignore_errors=True)
