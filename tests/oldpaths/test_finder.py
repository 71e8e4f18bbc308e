"""The finder below our own root; what it does for ``horovod`` is in tests/compat, in processes of their own."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hvd_cluster.common.exceptions as old
from hvd_cluster import errors
from hvd_cluster.oldpaths.finder import serve


def test_an_old_path_under_our_own_name_resolves() -> None:
    assert old.HorovodInternalError is errors.HorovodInternalError


def test_a_path_that_horovod_never_had_is_absent() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"hvd_cluster\.common\.nothing"):
        importlib.import_module("hvd_cluster.common.nothing")


def test_a_missing_attribute_names_the_old_module() -> None:
    with pytest.raises(AttributeError, match=r"hvd_cluster\.common\.exceptions.*Nothing"):
        _ = old.Nothing


def test_reload_keeps_the_module_working() -> None:
    assert importlib.reload(old) is old
    assert old.HostsUpdatedInterrupt is errors.HostsUpdatedInterrupt


def test_dir_and_star_import_show_the_names() -> None:
    namespace: dict[str, object] = {}
    exec("from hvd_cluster.common.exceptions import *", namespace)
    assert {"HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"} <= set(namespace)
    assert "HorovodInternalError" in dir(old)


def test_an_assignment_lands_where_the_name_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(RuntimeError):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(old, "HorovodInternalError", Other)
        assert errors.HorovodInternalError is Other
    assert errors.HorovodInternalError is not Other


def test_serving_a_root_twice_adds_one_finder() -> None:
    before = list(sys.meta_path)
    serve("hvd_cluster", first=False)
    assert sys.meta_path == before


def test_tab_completion_lists_the_packages_without_importing_them() -> None:
    code = (
        "import sys, hvd_cluster; names = set(dir(hvd_cluster)); "
        "print(sorted({'torch', 'pyspark', 'ray', 'tensorflow', 'keras'} & set(sys.modules))); "
        "print({'torch', 'spark', 'ray', 'estimators', 'data', 'keras', 'tensorflow', 'lightning', 'run'} <= names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]
