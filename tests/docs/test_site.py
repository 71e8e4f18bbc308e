"""The guides as HTML: no broken link, no page outside the navigation, a whole reference, notebooks with outputs."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvd_cluster import __version__
from hvd_cluster.estimators import params
from hvd_cluster.estimators.keras.params import KERAS_ROWS
from hvd_cluster.estimators.lightning.params import LIGHTNING_ROWS
from hvd_cluster.settings import Settings
from hvd_cluster.topology import is_job_variable

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs: make docs installs it"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return site


@pytest.fixture(scope="module")
def reference(site: Path) -> dict[str, str]:
    """The pages of the API reference, by name."""
    return {page.stem: page.read_text() for page in (site / "api").glob("*.html")}


def imported_by_the_guides() -> set[str]:
    """Dotted names below hvd_cluster that the guides' programs import."""
    found = set()
    for page in (ROOT / "docs").glob("*.md"):
        for code in re.findall(r"^```python[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("hvd_cluster.")}


def test_the_root_of_the_published_site_leads_to_the_latest_version(tmp_path: Path) -> None:
    clone = str(tmp_path / "clone")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), clone], check=True)
    shutil.copy(ROOT / "Makefile", clone)
    environ = os.environ | {
        f"GIT_{who}_{what}": "me@host" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environ["PYTHONPATH"] = clone
    made = subprocess.run(
        ["make", "docs-version", "--old-file=docs", f"VENV={sys.prefix}"],
        cwd=clone,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr

    def published(page: str) -> str:
        show = ["git", "-C", clone, "show", f"gh-pages:{page}"]
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout

    assert 'href="latest/"' in published("index.html")
    assert json.loads(published("versions.json"))[0]["aliases"] == ["latest"]
    assert published(f"{__version__}/index.html")


def test_functions_have_their_arguments(reference: dict[str, str]) -> None:
    assert "DistributedOptimizer" in reference["torch"]
    assert "backward_passes_per_step" in reference["torch"]


def test_every_setting_is_in_the_reference_with_its_meaning(reference: dict[str, str]) -> None:
    names = {knob.metadata["env"] for knob in fields(Settings)}
    shown = set(
        re.findall(r"<td><code>(HOROVOD_\w+)</code>\*?</td>\n<td>.*</td>\n<td>\w.*</td>", reference["settings"])
    )
    assert sorted(name for name in names - shown if not is_job_variable(name)) == []


def test_the_reference_links_to_the_guides_that_show_a_class(reference: dict[str, str]) -> None:
    assert 'href="../elastic.html#elastic-jobs"' in reference["torch"]
    assert 'href="../process-sets.html#process-sets"' in reference["tensorflow"]


def test_docstrings_have_no_roles_of_sphinx(reference: dict[str, str]) -> None:
    assert [name for name, page in reference.items() if re.search(r":\w+:<code>|<p>::</p>", page)] == []


def test_two_pages_are_notebooks_with_their_outputs(site: Path) -> None:
    fit = (site / "first-spark-fit.html").read_text()
    assert "data:image/png;base64," in fit
    assert "<b>TorchModel</b>" in fit
    assert "begun at" in (site / "first-ray-job.html").read_text()


def test_the_site_omits_what_is_for_readers_of_the_checkout(site: Path, reference: dict[str, str]) -> None:
    assert [name for name, page in reference.items() if "In the checkout" in page] == []
    assert "Read on in" not in (site / "first-spark-fit.html").read_text()


def test_every_name_that_a_guide_imports_is_in_the_reference(reference: dict[str, str]) -> None:
    anchors = {anchor for page in reference.values() for anchor in re.findall(r'id="(hvd_cluster\.[\w.]+)"', page)}
    assert {"hvd_cluster.torch.elastic.ElasticSampler", "hvd_cluster.ray.train.HorovodTrainer"} <= anchors
    assert {"hvd_cluster.keras.callbacks.MetricAverageCallback", "hvd_cluster.keras.elastic.KerasState"} <= anchors
    assert sorted(imported_by_the_guides() - anchors) == []


def test_every_public_name_is_in_the_reference(reference: dict[str, str]) -> None:
    record, missing, num_names = (ROOT / "tests/house/public_api.txt").read_text(), [], 0
    for module, listed in re.findall(r"^\[(.+)\]\n((?:.+\n)+)", record, re.MULTILINE):
        page = reference.get((module + ".").split(".")[1], reference["index"])
        for name in re.findall(r"^(?:class )?(\w+)\b(?!\.)", listed, re.MULTILINE):
            num_names += 1
            if f'id="{module}.{name}"' not in page and f"<code>{name}</code>" not in page:
                missing.append(f"{module}.{name}")
    assert num_names > 250
    assert missing == []


def test_every_param_of_an_estimator_is_in_the_reference(reference: dict[str, str]) -> None:
    tables = (params.ESTIMATOR_ROWS, params.TORCH_ROWS, params.MODEL_ROWS, KERAS_ROWS, LIGHTNING_ROWS)
    names = {row.name for table in tables for row in table}
    assert {"partitions_per_process", "mp_start_method"} <= names
    assert sorted(name for name in names if f"<td><code>{name}</code></td>" not in reference["estimators"]) == []
    assert "fit_on_parquet(params=None, dataset_idx=None)" in reference["estimators"]
