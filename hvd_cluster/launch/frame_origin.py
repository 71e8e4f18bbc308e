"""Whether a file belongs to the user, to this package, or to an installed library."""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path

_PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep


def is_own_package(file: str) -> bool:
    """Whether the file is part of this package."""
    return file.startswith(_PACKAGE_FOLDER)


def is_user_code(file: str) -> bool:
    """Whether the file is the user's: a script, a notebook cell, or a module that is not installed."""
    return not is_own_package(file) and not file.startswith(("<frozen ", *_library_folders()))


def _library_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update([*site.getsitepackages(), site.getusersitepackages()])
    return tuple(folder for folder in folders if folder)
