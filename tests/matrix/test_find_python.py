"""Which Python a row of the matrix gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FIND = str(Path(__file__).with_name("find_python.sh"))


def python(file: Path, version: str) -> str:
    """A command that answers as a Python of ``version`` does when its version is compared."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\ncase $2 in *\"'{version}'\"*) exit 0;; *) exit 1;; esac\n")
    file.chmod(0o755)
    return str(file)


def found(*versions: str, root: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PATH": f"{root / 'shims'}:/bin", "PYENV_ROOT": str(root)}
    return subprocess.run([FIND, *versions], env=environ, capture_output=True, text=True, check=False)


def test_pyenvs_pythons_are_found_when_its_commands_select_none_of_them(tmp_path: Path) -> None:
    python(tmp_path / "shims/python3.98", "none")
    free_threaded = python(tmp_path / "versions/3.98.0t/bin/python3.98", "3.98")
    assert found("3.98", root=tmp_path).returncode == 1
    assert Path(free_threaded).exists()
    installed = python(tmp_path / "versions/3.98.10/bin/python3.98", "3.98")
    assert found("3.99", "3.98", root=tmp_path).stdout.strip() == installed
    on_the_path = python(tmp_path / "shims/python3.98", "3.98")
    assert found("3.98", root=tmp_path).stdout.strip() == on_the_path


def test_a_python_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = found("3.99", root=tmp_path)
    assert missing.returncode == 1
    assert f"No Python 3.99 was found on the PATH or in {tmp_path}/versions" in missing.stderr


def test_a_real_python_passes_the_check(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    link = tmp_path / "shims" / f"python{version}"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    assert found(version, root=tmp_path).stdout.strip() == str(link)
