"""Log output, if ``HOROVOD_LOG_LEVEL`` is set; otherwise no handler is added."""

from __future__ import annotations

import logging

from hvd_cluster.settings import Settings

_PACKAGE = __name__.partition(".")[0]
#: Names of Horovod -> levels of Python, which has no "trace".
_LEVELS = {"trace": 1, "fatal": logging.CRITICAL}


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the standard error unless the program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def configure_logging(settings: Settings) -> None:
    """Show messages at or above ``settings.log_level``, if the user has set it."""
    if settings.log_level is None:
        return
    package = logging.getLogger(_PACKAGE)
    package.setLevel(_LEVELS.get(settings.log_level, settings.log_level.upper()))
    fallback = next((handler for handler in package.handlers if isinstance(handler, _FallbackHandler)), None)
    if fallback is None:
        if package.handlers:
            return  # the program's own
        fallback = _FallbackHandler()
        package.addHandler(fallback)
    when = "" if settings.log_hide_time else "%(asctime)s "
    fallback.setFormatter(logging.Formatter(f"{when}%(levelname)s %(name)s: %(message)s"))
