"""Where the library's messages go when ``HOROVOD_LOG_LEVEL`` asks for them: a library is quiet by itself."""

from __future__ import annotations

import logging

from hvd_cluster.settings import Settings

_PACKAGE = __name__.partition(".")[0]
#: Names of Horovod -> levels of Python, which has no "trace".
_LEVELS = {"trace": 1, "fatal": logging.CRITICAL}


class _StandIn(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the standard error as long as the program has not said itself where messages go."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def speak_as(settings: Settings) -> None:
    """Let messages at or above ``settings.log_level`` be seen, if the user has stated one; else nothing changes."""
    if settings.log_level is None:
        return
    package = logging.getLogger(_PACKAGE)
    package.setLevel(_LEVELS.get(settings.log_level, settings.log_level.upper()))
    stand_in = next((handler for handler in package.handlers if isinstance(handler, _StandIn)), None)
    if stand_in is None:
        if package.handlers:
            return  # the program's own
        stand_in = _StandIn()
        package.addHandler(stand_in)
    when = "" if settings.log_hide_time else "%(asctime)s "
    stand_in.setFormatter(logging.Formatter(f"{when}%(levelname)s %(name)s: %(message)s"))
