"""Calls to a filesystem, repeated after errors that may be temporary."""

from __future__ import annotations

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_cluster.data.files import filesystems
from hvd_cluster.data.files.filesystems import is_local
from hvd_cluster.monitor.activities import activity

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Calls in all, and the longest wait before the second one; each further wait is up to twice as long as the last.
NUM_ATTEMPTS = 5
FIRST_WAIT_S = 0.1

#: Temporary errors of a disk or a mounted network filesystem.
_PASSING_ERRNOS = frozenset({errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY})
#: Errors that a second attempt cannot change.
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_LASTING_ERRNOS = frozenset({errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTEMPTY})
#: The same in the words of pyarrow's C++ clients, whose errors have neither a type nor a number of their own.
_LASTING_TEXTS = re.compile(
    r"AWS Error (ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET)\b"
    r"|HTTP status 40[13]\b"
    r"|google::cloud::Status\((PERMISSION_DENIED|UNAUTHENTICATED)\b"
)


def retried(
    call: Callable[[], T], filesystem: Any, what: str, num_attempts: int = NUM_ATTEMPTS, *, warns: bool = True
) -> T:
    """The result of a call that only reads, or that may be made twice.

    An OSError of a remote filesystem (throttling, a connection that was cut, a server that is being replaced) counts
    as temporary unless its type, number or text says otherwise; an error of a local filesystem only if its number says
    so. Waits are drawn at random up to a bound that doubles, so that ranks which failed together do not come back
    together ("full jitter", M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

    Args:
        call: what to do.
        filesystem: the ``pyarrow.fs.FileSystem`` that it asks.
        what: names the call in the log, e.g. "reading s3://b/x".
        num_attempts: calls at most, >= 1.
        warns: log a warning if it takes long (:mod:`hvd_cluster.monitor.activities`). A local path may be a mount.
    """
    local = is_local(filesystem)
    with activity(what, warns=warns):
        for attempt in range(1, num_attempts):
            try:
                return call()
            except OSError as error:
                if not may_pass(error, local=local):
                    raise
                wait_s = random.uniform(0, FIRST_WAIT_S * 2 ** (attempt - 1))
                logger.info("%s failed (%s); attempt %d of %d follows", what, error, attempt + 1, num_attempts)
                time.sleep(wait_s)
        return call()


def file_info(filesystem: Any, path: Any) -> Any:
    """The ``pyarrow.fs.FileInfo`` of a path.

    A list of them for several paths or a ``FileSelector``.
    """
    shown = path if isinstance(path, str) else getattr(path, "base_dir", "files")
    return retried(lambda: filesystem.get_file_info(path), filesystem, f"looking at {shown}")


def read_file(filesystem: Any, path: str) -> bytes:
    """The whole content of a file."""

    def read() -> bytes:
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())

    return retried(read, filesystem, f"reading {path}")


def write_file(filesystem: Any, path: str, data: bytes, *, atomic_upload: bool) -> None:
    """:func:`hvd_cluster.data.files.filesystems.write_whole`, with retries.

    It tries again after temporary errors.
    """
    retried(
        lambda: filesystems.write_whole(filesystem, path, data, atomic_upload=atomic_upload),
        filesystem,
        f"writing {path}",
    )


def may_pass(error: OSError, *, local: bool) -> bool:
    """Whether an error of a filesystem may be gone at the next attempt."""
    if isinstance(error, _LASTING) or error.errno in _LASTING_ERRNOS:
        return False
    if not local and _LASTING_TEXTS.search(str(error)):
        return False
    return not local or error.errno in _PASSING_ERRNOS
