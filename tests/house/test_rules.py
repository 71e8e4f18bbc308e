"""Rules of the package that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fast
import pytest
import yaml

import hvd_cluster

PACKAGE = Path(hvd_cluster.__file__).parent
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MAY_TOUCH_THE_ENVIRONMENT = {"settings.py", "topology.py"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text(), filename=str(file))


@pytest.mark.long
def test_the_environment_is_touched_in_two_files_only() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        if name not in MAY_TOUCH_THE_ENVIRONMENT
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os")
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and ENVIRONMENT & {name.name for name in node.names}
        )
    ]
    assert found == [], "read it through settings.py or topology.py, write it through topology.export()"


def test_the_environment_is_written_in_one_function_only() -> None:
    writers = {
        function.name
        for name in MAY_TOUCH_THE_ENVIRONMENT
        for function in ast.walk(ast.parse((PACKAGE / name).read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and "environ" in ast.unparse(node.value)
        )
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in {"environ.pop", "environ.update", "os.putenv"})
    }
    assert writers == {"export"}


def test_no_folder_of_tests_is_a_package() -> None:
    assert list(Path(__file__).parents[1].rglob("__init__.py")) == [], "tests/ray/__init__.py would shadow the real Ray"


@pytest.mark.long
def test_the_first_line_of_a_docstring_is_short() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{name}:{node.body[0].lineno}: {text.splitlines()[0]}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if len(text.splitlines()[0]) >= 80
    ]
    assert found == [], "what follows the first idea goes into a paragraph of its own"


@pytest.mark.long
def test_no_drawer_for_odds_and_ends() -> None:
    assert [name for name, _ in modules() if Path(name).stem in {"utils", "util", "common", "helpers", "misc"}] == [], (
        "name the file by what it defines"
    )


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hvd_cluster", ["torch", "numpy", "cloudpickle", "pyspark", "ray", "pyarrow", "pandas"]),
        ("hvd_cluster.torch", ["pyspark", "ray", "pyarrow", "pandas", "tensorflow"]),
        ("hvd_cluster.launch", ["pyspark", "ray", "pyarrow", "pandas"]),
        ("hvd_cluster.estimators", ["ray", "tensorflow"]),
    ],
)
def test_importing_one_part_loads_no_other(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_the_workflow_only_calls_make_targets() -> None:
    root = Path(__file__).parents[2]
    workflow = yaml.safe_load((root / ".github/workflows/ci.yml").read_text())
    makefile = (root / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    rows = re.search(r"^MATRIX := (.*)$", makefile, re.MULTILINE)
    assert rows is not None
    targets |= {f"matrix-{row}" for row in rows[1].split()}
    for name, job in workflow["jobs"].items():
        commands = [step["run"] for step in job["steps"] if "run" in step and "apt-get" not in step["run"]]
        assert commands == ["make ${{ matrix.target }}"], name
        assert set(job["strategy"]["matrix"]["target"]) <= targets, name


def test_the_release_workflow_only_calls_make_dist_and_names_no_index() -> None:
    root = Path(__file__).parents[2]
    text = (root / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["ci"].pop("uses") == "./.github/workflows/ci.yml"
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("ci", "build")
    commands = {name: [step["run"] for step in job.get("steps", []) if "run" in step] for name, job in jobs.items()}
    assert commands == {"ci": [], "build": ["make dist"], "publish": []}
    assert "id-token" not in jobs["build"]["permissions"]
    assert "://" not in text


def test_the_makefile_names_tests_that_exist() -> None:
    root = Path(__file__).parents[2]
    lines = [line for line in (root / "Makefile").read_text().splitlines() if not line.startswith("#")]
    named = set(re.findall(r"tests/[\w/]+(?:\.(?:py|sh))?", "\n".join(lines)))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (root / name).exists()] == []


def starts() -> None:
    subprocess.run(["true"], check=True)


def leads_there() -> None:
    starts()


def test_a_fast_test_names_nothing_that_starts_a_process() -> None:
    assert fast._starts(leads_there)
    assert not fast._starts(modules)


def test_a_process_that_a_fast_test_starts_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(fast, "_started", noted)
    monkeypatch.setattr(fast, "_is_watching", True)
    starts()
    assert "['true']" in noted[0]
