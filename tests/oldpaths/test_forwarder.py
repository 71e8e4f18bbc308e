"""What an old module shows of the new place, and what it keeps to itself; ``horovod`` in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hvd_cluster.engine.process_sets
import hvd_cluster.torch
from hvd_cluster.oldpaths.finder import OldPathFinder
from hvd_cluster.oldpaths.forwarder import Forwarder
from hvd_cluster.oldpaths.table import TABLE


def old(path: str) -> Forwarder:
    return Forwarder(f"horovod.{path}", path, TABLE[path])


def printed(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import hvd_cluster.compat\n{code}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_the_stores_with_a_spelling_of_their_own_stand_beside_the_others() -> None:
    from hvd_cluster.data.files.store_families import DBFSLocalStore, HDFSStore

    stores = old("spark.common.store")
    assert (stores.HDFSStore, stores.DBFSLocalStore) == (HDFSStore, DBFSLocalStore)
    assert {"Store", "LocalStore", "FilesystemStore", "HDFSStore", "DBFSLocalStore"} <= set(dir(stores))


@pytest.mark.parametrize("name", ["ProcessSet", "add_process_set", "remove_process_set", "global_process_set"])
def test_process_sets_are_one_and_the_same_by_either_path(name: str) -> None:
    here = getattr(hvd_cluster.engine.process_sets, name)
    assert getattr(old("common.process_sets"), name) is here
    assert getattr(old("torch"), name) is here


@pytest.mark.parametrize("path", sorted(path for path, row in TABLE.items() if row.module))
def test_our_own_files_are_not_shown_as_horovods(path: str) -> None:
    module, package = old(path), TABLE[path].module
    files = [name.rpartition(".")[2] for name in sys.modules if name.rpartition(".")[0] == package]
    assert [
        name for name in files if hasattr(module, name) and getattr(module, name).__name__ == f"{package}.{name}"
    ] == []


def test_the_private_files_of_the_spark_package_stay_private() -> None:
    import hvd_cluster.spark.job
    import hvd_cluster.spark.messages

    spark = old("spark")
    assert spark.run is hvd_cluster.spark.run
    assert not any(hasattr(spark, name) for name in ("job", "plan", "listener", "session"))


@pytest.mark.parametrize(
    "code",
    [
        "import horovod.spark.job.gloo_exec_fn",
        "import horovod.spark, hvd_cluster.spark.job\nfrom horovod.spark import job",
        "import horovod.spark.job",
    ],
)
def test_a_path_that_is_not_served_names_itself_and_what_is(code: str, tmp_path: Path) -> None:
    text = printed(code, tmp_path)
    assert text.startswith("ModuleNotFoundError: No module named 'horovod.spark.job'")
    assert "horovod.spark.torch" in text
    assert "docs/migrating.md" in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("code", "instead"),
    [
        ("import horovod.run", "The nearest that it serves: horovod.runner;"),
        ("import horovod.nothing_like_it", "horovod.runner, horovod.spark, horovod.tensorflow, horovod.torch;"),
        ("from horovod.ray import RayHostDiscovery", "'RayHostDiscovery' is in hvd_cluster.ray.elastic;"),
        ("import horovod.ray; horovod.ray.RayHostDiscovery", "; hvd_cluster.ray.elastic has that name)"),
    ],
)
def test_a_missing_name_costs_one_line_that_says_where_it_is(code: str, instead: str, tmp_path: Path) -> None:
    text = printed(code, tmp_path)
    assert instead in text
    assert len(text) < 400


def test_what_is_asked_for_in_a_try_can_be_missing(tmp_path: Path) -> None:
    code = "try:\n    import horovod.mxnet as hvd\nexcept ImportError:\n    import horovod.torch as hvd\nprint(hvd)"
    assert "horovod.torch" in printed(code, tmp_path)


def test_a_module_of_our_own_that_does_not_exist_keeps_pythons_words() -> None:
    assert OldPathFinder("hvd_cluster").find_spec("hvd_cluster.launch.nothing") is None


def test_what_holds_an_old_module_unpickles_where_no_one_answers_for_horovod_yet(tmp_path: Path) -> None:
    write = """
import cloudpickle, pathlib
import horovod.torch as hvd
def ranks():
    return hvd.size()
pathlib.Path("pickled").write_bytes(cloudpickle.dumps(ranks))
"""
    assert printed(write, tmp_path) == ""
    read = "import pickle; print(pickle.load(open('pickled', 'rb')).__globals__['hvd'].__name__)"
    done = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("horovod.torch", "")
