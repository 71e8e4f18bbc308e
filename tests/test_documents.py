"""What README.md and docs/ show is run, and what they list is there."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvd_cluster.oldpaths.table import TABLE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
#: File name, from the first line of the block -> the block.
SCRIPTS = dict(re.findall(r"```python\n(?=# ([\w.]+)\n)(.*?)```", README, flags=re.DOTALL))


def run(*command: str, cwd: Path) -> str:
    """What ``command`` prints in an activated environment: Spark's workers are the first ``python3`` of the path."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(name: str, folder: Path) -> str:
    (folder / name).write_text(SCRIPTS[name])
    return name


def test_every_script_of_the_readme_is_run_below() -> None:
    assert set(SCRIPTS) == {"train.py", "on_spark.py", "on_ray.py", "estimator.py"}


def test_the_script_trains_under_hvdrun(tmp_path: Path) -> None:
    assert "hvdrun -np 2 python train.py" in README
    hvdrun = str(Path(sys.executable).with_name("hvdrun"))
    out = run(hvdrun, "-np", "2", sys.executable, write("train.py", tmp_path), cwd=tmp_path)
    losses = dict(re.findall(r"rank (\d) of 2: loss ([\d.]+)", out))
    assert set(losses) == {"0", "1"}
    assert all(float(loss) < 2.0 for loss in losses.values()), "100 steps began near 8/3"


@pytest.mark.slow
def test_the_script_runs_alone_too(tmp_path: Path) -> None:
    assert "rank 0 of 1" in run(sys.executable, write("train.py", tmp_path), cwd=tmp_path)


@pytest.mark.spark("local")
def test_the_function_on_spark_returns_what_its_comment_says(tmp_path: Path) -> None:
    out = run(sys.executable, write("on_spark.py", tmp_path), cwd=tmp_path)
    assert out.strip().splitlines()[-1] == "[(0, 2), (1, 2)]"


@pytest.mark.slow
def test_the_function_on_ray_returns_what_its_comment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # its sockets' names must be short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        out = run(sys.executable, write("on_ray.py", tmp_path), cwd=tmp_path)
    assert "[(0, 2), (1, 2)]" in out.splitlines()


def test_the_estimator_fits_and_scores(tmp_path: Path) -> None:
    out = run(sys.executable, write("estimator.py", tmp_path), cwd=tmp_path)
    assert "'epoch': 9" in out
    assert "y__output" in out


def test_files_that_the_documents_link_to_exist() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"(?:\]\(|src=\")([^)\"#:]+)[)\"]", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_migration_guide_lists_every_old_path() -> None:
    listed = re.findall(r"^\| `([^`]+)` \| .* \|$", (ROOT / "docs" / "migrating.md").read_text(), flags=re.MULTILINE)
    assert set(TABLE) <= {"" if path == "(itself)" else path for path in listed}


@functools.cache
def package_sources() -> dict[Path, str]:
    return {path: path.read_text() for path in (ROOT / "hvd_cluster").rglob("*.py")}


PAGES = [ROOT / "docs" / "structure.md", *sorted((ROOT / "docs" / "structure").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_objects_that_a_page_about_the_structure_names_exist(page: Path) -> None:
    text = page.read_text()
    # The page of a package names files by their path below the package.
    folders = [ROOT, ROOT / "hvd_cluster", ROOT / "hvd_cluster" / page.stem]
    files = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(files) >= 5
    assert [file for file in files if not any((folder / file).exists() for folder in folders)] == []
    # What an item of a page introduces in bold is defined in one of the files that the item names.
    for item in re.split(r"\n(?=\d+\. | *- )|\n\n", text):
        named = [folder / file for file in re.findall(r"`([\w/]+\.py)`", item) for folder in folders]
        defined = "\n".join(package_sources().get(path, "") for path in named)
        for name in re.findall(r"\*\*`?(\w+)`?\*\*", item):
            assert re.search(rf"\b(?:class|def) {name}\b", defined), f"{name}: {item}"


def test_every_package_has_a_page_about_its_structure() -> None:
    packages = {path.parent.name for path in (ROOT / "hvd_cluster").glob("*/__init__.py")} - {"compat"}
    assert packages == {page.stem for page in PAGES[1:]}
