"""Which Python runs the workers: one that the user names, also one that came in an archive."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import hvd_cluster.spark
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.spark.host import resolve_executable


def _python(path: Path, mark: str) -> Path:
    """A program that is this Python with a variable of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nMARK={mark} exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def mark() -> str | None:
    return os.environ.get("MARK")


@pytest.mark.spark("local-cluster", "connect", "local")
def test_a_relative_executable_is_one_of_the_sessions_archives(spark: Any, spark_master: str, tmp_path: Path) -> None:
    _python(tmp_path / "content" / "bin" / "python", "packed")
    archive = tmp_path / f"{tmp_path.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "content" / "bin", "bin")
    name = f"environment_{tmp_path.name}"
    if spark_master == "connect":
        spark.addArtifacts(f"{archive}#{name}", archive=True)
    else:
        spark.sparkContext.addArchive(f"{archive}#{name}")
    results = hvd_cluster.spark.run(mark, num_proc=2, executable=f"{name}/bin/python")
    assert results == ["packed", "packed"]


@pytest.mark.spark("local")
def test_an_absolute_executable_is_taken_as_it_is_and_a_missing_one_is_named(spark: Any, tmp_path: Path) -> None:
    python = _python(tmp_path / "python", "mine")
    assert hvd_cluster.spark.run(mark, num_proc=1, executable=str(python)) == ["mine"]
    with pytest.raises(WorkerFailedError, match="nowhere/bin/python"):
        hvd_cluster.spark.run(mark, num_proc=1, executable="nowhere/bin/python")


def test_names_without_a_folder_are_for_the_path() -> None:
    assert resolve_executable("python3") == "python3"
    assert resolve_executable(None) is None
    assert resolve_executable("/usr/bin/python3") == "/usr/bin/python3"
