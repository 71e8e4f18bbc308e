"""The code that travels with a model in MLflow."""

from __future__ import annotations

import ast
import subprocess
import sys

from hvd_cluster.estimators.logged_model.imports import imported
from hvd_cluster.estimators.logged_model.requirements import LocalCode
from hvd_cluster.estimators.logged_model.sources import scoring_modules, write_code

#: What may be installed where a model is loaded.
INSTALLED = {"cloudpickle", "keras", "mlflow", "numpy", "pandas", "pyarrow", "torch"}


def test_scoring_imports_few_modules_and_only_packages_that_a_model_requires():
    modules = scoring_modules()
    assert len(modules) < 30
    for name, source in modules.items():
        tops = {one.partition(".")[0] for one in imported(ast.parse(source))} - set(sys.stdlib_module_names)
        assert tops <= INSTALLED | {"hvd_cluster"}, name


def test_the_modules_import_nothing_of_ours_later():
    for name, source in scoring_modules().items():
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        inner = [node for one in functions for node in ast.walk(one) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not any("hvd_cluster" in ast.unparse(node) for node in inner), name


def test_the_copy_is_imported_without_hvd_cluster_and_the_users_code_with_it(tmp_path):
    (tmp_path / "features.py").write_text("TOKENS = 7\n")
    package = tmp_path / "nets"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("from .deep import WIDTH\n")
    (package / "deep.py").write_text("WIDTH = 3\n")
    (package / "data" / "large.bin").write_bytes(b"not code")
    local = [LocalCode("features", tmp_path / "features.py"), LocalCode("nets", package)]
    loader = write_code(tmp_path / "code", local)
    assert not (tmp_path / "code" / "nets" / "data" / "large.bin").exists()
    code = (
        f"import sys; sys.modules['hvd_cluster'] = None; sys.path.insert(0, sys.argv[1]); import {loader} as found, "
        "features, nets; print(found._PACKAGE, features.TOKENS, nets.WIDTH)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "code")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == [loader.partition(".")[0], "7", "3"], done.stderr
    # The same content has the same name.
    assert write_code(tmp_path / "again", []) == loader


def test_imports_are_those_that_run_when_a_module_is_imported():
    source = """
import a.b
from c import d
from . import e
from ..f import g
if TYPE_CHECKING:
    import h
try:
    import i
except ImportError:
    import j
class K:
    import l
def function():
    import m
"""
    found = imported(ast.parse(source), "package.inner")
    assert found == {"a.b", "c", "c.d", "package.inner", "package.inner.e", "package.f", "package.f.g", "i", "j", "l"}
