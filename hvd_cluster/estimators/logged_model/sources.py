"""Source code that travels with a model in MLflow, to score without hvd_cluster.

Of this package these are the modules that scoring imports, under the name of a package of their own. The name has a
hash of the content: a process can load models that were logged by different versions.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from hvd_cluster.estimators.logged_model.imports import imported, is_package, source_of
from hvd_cluster.estimators.logged_model.requirements import LocalCode

_OURS = "hvd_cluster"
#: The module that MLflow loads, and what the pickles of models of all frameworks refer to.
_LOADER = f"{_OURS}.estimators.logged_model.columns_model"
_ENTRIES = (_LOADER, f"{_OURS}.estimators.torch.framework", f"{_OURS}.estimators.keras.framework")
_IMPORT = re.compile(rf"^(\s*(?:from|import) ){_OURS}(?=[.\s])", re.MULTILINE)


@cache
def scoring_modules() -> dict[str, str]:
    """The modules of this package that scoring imports, with their sources."""
    found: dict[str, str] = {}
    waiting = list(_ENTRIES)
    while waiting:
        name = waiting.pop()
        if name in found or is_package(name) or (source := source_of(name)) is None:
            continue
        found[name] = source
        waiting += [module for module in imported(ast.parse(source)) if module.startswith(f"{_OURS}.")]
    return dict(sorted(found.items()))


def write_code(folder: Path, local: Iterable[LocalCode]) -> str:
    """Write the scoring modules, and code of the user's, into a new folder.

    Returns:
        The name of the module that MLflow loads, importable with ``folder`` in ``sys.path``.
    """
    modules = scoring_modules()
    digest = hashlib.sha256(repr(modules).encode()).hexdigest()
    package = f"{_OURS}_scoring_{digest[:8]}"
    for name, source in modules.items():
        file = folder.joinpath(package, *name.split(".")[1:]).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_IMPORT.sub(rf"\g<1>{package}", source), encoding="utf-8")
    for parent in {file.parent for file in (folder / package).rglob("*.py")} | {folder / package}:
        (parent / "__init__.py").touch()
    (folder / package / "__init__.py").write_text(
        f'"""The part of {_OURS} that scores rows, copied when the model was logged."""\n', encoding="utf-8"
    )
    for code in local:
        if code.path.is_dir():
            shutil.copytree(code.path, folder / code.name, ignore=_only_python)
        else:
            shutil.copy(code.path, folder / f"{code.name}.py")
    return package + _LOADER.removeprefix(_OURS)


def _only_python(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not (name.endswith(".py") or (Path(folder) / name).is_dir()) or name[0] == "."}
