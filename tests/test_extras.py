"""The extras bring what the notebooks, examples and guides import, and pip can resolve them under the pins."""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: What the tests have in place of what a user gets: the same modules.
STANDS_FOR = {"tensorflow": "tensorflow-cpu"}
#: The extras that a guide's programs need; the others need none.
GUIDES = {
    "data.md": ["data"],
    "estimators.md": ["data"],
    "getting-started.md": ["data"],
    "hyperparameter-search.md": ["spark", "ray"],
    "inference.md": ["data", "mlflow", "tensorflow"],
    "keras-estimator.md": ["data", "tensorflow"],
    "keras.md": ["tensorflow"],
    "lightning.md": ["lightning"],
    "raw-columns.md": ["data"],
    "ray.md": ["ray"],
    "spark.md": ["spark"],
    "tables.md": ["delta"],
    "tensorflow.md": ["tensorflow"],
    "torch-backend.md": ["data"],
}
#: Modules of this checkout and of hvd_cluster.compat, and one that has an environment of its own.
OURS = {"hvd_cluster", "horovod", "sparkdl", "petastorm", "benchmarks", "mxnet"}


@functools.cache
def brought_by(*extras: str) -> dict[str, set[str]]:
    """Distribution -> its extras that are asked for, of all that pip installs for ``.[extras]``."""
    found: dict[str, set[str]] = {}
    waiting = [Requirement(text) for text in PROJECT["dependencies"]]
    waiting.append(Requirement(f"hvd-cluster[{','.join(extras)}]"))
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found and requirement.extras <= found[name]:
            continue
        found.setdefault(name, set()).update(requirement.extras)
        if name == "hvd-cluster":
            waiting += [Requirement(text) for extra in requirement.extras for text in EXTRAS[extra]]
            continue
        try:
            requires = distribution(STANDS_FOR.get(name, name)).requires or []
        except PackageNotFoundError:
            continue
        for each in map(Requirement, requires):
            if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in (*requirement.extras, "")):
                waiting.append(each)
    return found


def imported(code: str) -> set[str]:
    """Dotted names that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.partition(".")[0] not in {*sys.stdlib_module_names, *OURS}}


@functools.cache
def homes_of_modules() -> Mapping[str, list[str]]:
    return packages_distributions()


def not_brought(names: set[str], extras: list[str]) -> Iterator[str]:
    """The names among those imported that ``.[extras]`` does not bring."""
    brought = brought_by(*extras)
    homes = homes_of_modules()
    stand_ins = {stand_in: name for name, stand_in in STANDS_FOR.items()}
    for name in sorted(names):
        package, _, below = name.partition(".")
        dists = [canonicalize_name(dist) for dist in homes.get(package, [package])]
        dists = [stand_ins.get(dist, dist) for dist in dists]
        asked = [brought[dist] for dist in dists if dist in brought]
        own_extras = distribution(dists[0]).metadata.get_all("Provides-Extra") if dists == ["ray"] else []
        # Ray's parts need their extras: a plain `ray` has no pydantic, without which `ray.train` is no module.
        part = below.partition(".")[0]
        if not asked or (part in (own_extras or []) and not any(part in extra for extra in asked)):
            yield name


def code_of(notebook: Path) -> str:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "".join("".join([*cell["source"], "\n"]) for cell in cells).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


@pytest.mark.long
@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("examples/**/*.py")]), ids=lambda p: p.name
)
def test_all_brings_what_notebooks_and_examples_import(path: Path) -> None:
    code = code_of(path) if path.suffix == ".ipynb" else path.read_text()
    beside = {file.stem for file in path.parent.glob("*.py")}
    assert list(not_brought(imported(code) - beside, ["all"])) == []


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(page.name for page in (ROOT / "docs").glob("*.md")))
def test_a_guides_extras_bring_what_its_programs_import(page: str) -> None:
    # Those of examples/ are looked at above.
    block = r"^```python(?![^\n]*tests/examples)[^\n]*\n(.*?)^```$"
    blocks = re.findall(block, (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    names = {name for block in blocks for name in imported(block)}
    assert list(not_brought(names, GUIDES.get(page, []))) == []


@pytest.mark.parametrize("page", sorted(GUIDES))
def test_a_guide_says_which_extras_it_needs(page: str) -> None:
    said = re.findall(r"pip install '\.\[([\w,]+)\]'", (ROOT / "docs" / page).read_text())
    assert set(GUIDES[page]) <= {extra for extras in said for extra in extras.split(",")}


@pytest.mark.parametrize("extra", ["spark", "ray", "lightning"])
def test_an_extra_brings_what_the_package_of_its_name_imports(extra: str) -> None:
    files = [*(ROOT / "hvd_cluster" / extra).rglob("*.py"), *(ROOT / "hvd_cluster/estimators" / extra).rglob("*.py")]
    names = {name for file in files for name in imported(file.read_text())}
    # What stands beside them where a user has it.
    assert list(not_brought(names - {"keras", "IPython.display"}, [extra])) == []


@pytest.mark.parametrize("extra", ["data", "spark", "ray", "lightning", "all"])
def test_pandas_stays_at_what_spark_takes(extra: str) -> None:
    """Without the pins, too, which a user does not have; and a Databricks runtime keeps the one that it has."""

    def wanted_by(extra: str) -> Iterator[Requirement]:
        for requirement in map(Requirement, EXTRAS[extra]):
            yield requirement
            if canonicalize_name(requirement.name) == "hvd-cluster":
                for other in requirement.extras:
                    yield from wanted_by(other)

    pandas = [requirement.specifier for requirement in wanted_by(extra) if requirement.name == "pandas"]
    assert pandas
    assert all(each.contains(version) for each in pandas for version in ("1.5.3", "2.2.3"))
    assert not all(each.contains("3.0.0") for each in pandas)


def test_what_no_extra_brings_is_found() -> None:
    assert list(not_brought({"torch.nn", "sklearn.datasets", "ray.tune", "ray.train.RunConfig"}, ["spark"])) == [
        "ray.train.RunConfig",
        "ray.tune",
        "sklearn.datasets",
    ]


def test_pins_say_which_of_them_have_left_python_3_10() -> None:
    known = 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        try:
            python = distribution(pin.name).metadata.get("Requires-Python")
        except PackageNotFoundError:
            continue
        known += 1
        assert pin.marker is not None or SpecifierSet(python or "").contains("3.10.12"), line
    assert known > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_pip_resolves_an_extra_under_the_pins(extra: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for name in ("pyproject.toml", "README.md", "LICENSE", "hvd_cluster/__init__.py"):  # a build leaves files behind
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*pip, "--report", str(report), "-c", str(ROOT / "constraints.txt"), f".[{extra}]"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "does not provide the extra" not in done.stderr
    names = {canonicalize_name(each["metadata"]["name"]) for each in json.loads(report.read_text())["install"]}
    assert {canonicalize_name(Requirement(text).name) for text in EXTRAS[extra]} <= names


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pip_resolves_the_core_and_all_extras_for_python_3_14(tmp_path: Path) -> None:
    """From wheels, without our pins, which are those of 3.11. Of pyspark, which has no wheel, what [connect] brings.

    pip fetches the wheels whose metadata the index does not serve apart: torch's alone has 0.5 GB.
    """
    wanted: list[str] = []
    waiting = [*PROJECT["dependencies"], *EXTRAS["all"]]
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": "3.14"}):
            continue
        if canonicalize_name(requirement.name) == "hvd-cluster":
            waiting += [text for extra in requirement.extras for text in EXTRAS[extra]]
        elif requirement.name == "pyspark":
            wanted += ["grpcio", "grpcio-status", "googleapis-common-protos", "py4j"]
        else:
            wanted.append(str(requirement))
    assert not any("tensorflow" in text for text in wanted)
    report = tmp_path / "report.json"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        str(report),
    ]
    pip += ["--python-version", "3.14", "--only-binary=:all:", "--target", str(tmp_path), *dict.fromkeys(wanted)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {canonicalize_name(each["metadata"]["name"]) for each in json.loads(report.read_text())["install"]}
    assert {"torch", "ray", "pyarrow", "keras", "lightning"} <= names
