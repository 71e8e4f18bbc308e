"""pyarrow and other optional packages: found when needed, or named in errors."""

from __future__ import annotations

import importlib
from typing import Any

from hvd_cluster.errors import MissingExtraError


def load_pyarrow(module: str = "pyarrow") -> Any:
    """Import ``pyarrow`` or one of its modules."""
    return load_extra(module, "data", "to read and write Parquet and Arrow data")


def since_pyarrow(release: int, **arguments: bool) -> dict[str, bool]:
    """Arguments that functions of pyarrow have since a release.

    Empty with an older one.
    """
    return arguments if int(load_pyarrow().__version__.partition(".")[0]) >= release else {}


def load_fsspec() -> Any:
    """Import ``fsspec``."""
    return load_extra("fsspec", "data", "to open stores that are neither local nor HDFS")


def load_extra(package: str, extra: str, purpose: str) -> Any:
    """Import a package that an extra installs, or a module of it.

    ``purpose`` is the end of "needed ...".
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(package.partition(".")[0], extra, purpose) from error
